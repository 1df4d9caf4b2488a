"""The guides in docs/: their links lead somewhere, their messages are the code's, their code runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.host import ROOT
from quantwm_core import METHODS, CacheSettings, layouts, span
from quantwm_core.accounting import format_bytes
from quantwm_core.command_line import MODELS, main
from quantwm_core.methods import LayerState
from quantwm_core.planning import plan_bytes
from quantwm_core.presets import PRESETS
from quantwm_core.query_stats import QueryStats
from quantwm_core.span import storage_bytes

GUIDES = sorted((ROOT / "docs").glob("*.md"))
MODEL_PAGES = sorted((ROOT / "docs" / "models").glob("*.md"))
LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]+)?\)|src=\"([^\"]+)\"")
PATH = re.compile(r"`((?:benchmarks|docs|locales|nodes|quantwm_core|scripts|tests|web|world_models)/[\w./-]*)`")
CODE = re.compile(r"`([^`\n]+)`")
# Code blocks of the developer guide, in their order.
EXAMPLE_METHOD, EXAMPLE_SPAN, EXAMPLE_CONVERSATION = range(3)
PACK_FOLDERS = ("nodes", "quantwm_core", "kernels", "world_models")


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@cache
def spoken() -> str:
    """All texts in the pack's code, what is filled in replaced by `...`."""
    texts = []
    for path in (path for folder in PACK_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def example(number: int, name: str, folder: Path) -> ModuleType:
    """A code block of the developer guide as the module of that name."""
    code = re.findall(r"^```python\n(.*?)^```", read("developer-guide.md"), re.DOTALL | re.MULTILINE)[number]
    file = folder / f"example_{number}.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", GUIDES + MODEL_PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = [page.parent / (link or image) for link, image in LINK.findall(text)]
    targets += [ROOT / path for path in PATH.findall(text) if path != "quantwm_core/methods/minmax.py"]
    assert not [target for target in targets if not target.exists()]


def test_readme_leads_to_every_guide():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in GUIDES if f"(docs/{page.name})" not in readme]


def test_the_index_leads_to_every_page():
    index = read("README.md")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in GUIDES + MODEL_PAGES if page.stem != "README"]
    assert not [page for page in pages if f"({page})" not in index]


@pytest.mark.parametrize(
    ("page", "geometry", "blocks"),
    [
        ("causal-forcing", MODELS["causal-forcing"], [3 * 1560] * 8),
        ("lingbot", MODELS["lingbot-14b"], [4 * 1560] * 4 + [2 * 1560]),
        ("lingbot", MODELS["lingbot-1.3b"], [4 * 1560] * 4 + [2 * 1560]),
        ("longcat", MODELS["longcat"], [19 * 1560]),
    ],
    ids=["causal-forcing", "lingbot-14b", "lingbot-1.3b", "longcat"],
)
def test_sizes_on_a_models_page_are_planned_ones(page, geometry, blocks):
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", read(f"models/{page}.md"), re.MULTILINE))
    settings = {
        "off": CacheSettings("off"),
        "`best quality`, 4 bits": CacheSettings(**PRESETS["best quality"]),
        "`balanced`, 2 bits": CacheSettings(),
        "`balanced` on the CPU": CacheSettings(cache_device="cpu"),
    }
    for name, choice in settings.items():
        (cells,) = (cells for label, cells in rows.items() if name in label)
        plan = plan_bytes(choice, geometry, blocks)
        assert format_bytes(plan.resident) in cells.split(" | "), name
        if geometry != MODELS["lingbot-1.3b"]:
            assert cells.split(" | ")[-1] == format_bytes(plan.peak), name


def test_messages_are_those_of_the_code():
    # Several words in code type are something that the program says, not a name.
    messages = [text for text in CODE.findall(read("troubleshooting.md")) if text.count(" ") >= 2]
    assert len(messages) > 20
    assert not [message for message in messages if message not in spoken()]


def test_figures_beside_presets_are_the_measured_ones():
    rows = json.loads((ROOT / "benchmarks" / "results" / "quality-h200.json").read_text())["rows"]
    variants = {"balanced": ("default", 2), "smallest": ("rank 8", 2), "best quality": ("default", 4)}
    folder = ROOT / "web" / "docs"
    for page in (folder / "QuantWMKVCache.md", *(folder / "QuantWMKVCache").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for preset, (variant, bits) in variants.items():
            (line,) = (line for line in text.splitlines() if line.startswith(f"| `{preset}` |"))
            (row,) = (
                row
                for row in rows
                if (row["method"], row["variant"], row["key_bits"], row["value_bits"])
                == ("quantwm", variant, bits, bits)
                and not row["series"]
            )
            assert f"{row['psnr_mean']:.1f} dB" in line and f"{row['bits_per_element']:.2f}" in line


def test_measured_figures_are_the_readmes():
    rows = re.findall(r"^\| (\d+, \d+) \| (.+) \|$", read("which-bits.md"), re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(rows) == 4
    for bits, cells in rows:
        size, psnr, worst, token = cells.split(" | ")
        assert re.search(
            re.escape(f"| **`quantwm`** | {bits} | {size} | {psnr} | {worst} | ")
            + r"[\d.]+ \| [\d.]+ \| "
            + re.escape(token),
            readme,
        ), bits


@pytest.fixture
def minmax(tmp_path, monkeypatch):
    monkeypatch.setattr(span, "PER_TOKEN", span.PER_TOKEN | {"k_zeros"})
    return example(EXAMPLE_METHOD, "quantwm_core.methods.minmax", tmp_path).MinMax


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 2), (4, 16), (16, 2)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_method_of_the_guide(minmax, key_bits, value_bits, head_dim):
    assert "minmax" not in METHODS, "the guide's example has become real: show another"
    method = minmax(CacheSettings(key_bits=key_bits, value_bits=value_bits))
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 13, 3, head_dim, generator=generator) for _ in "kv")
    packed = method.encode(k, v, QueryStats(), LayerState())
    for start, stop, piece in ((0, 13, packed), (0, 5, packed.narrow(5)), (5, 13, packed.tail(5))):
        for true, got, bits in zip((k, v), method.decode(piece), (key_bits, value_bits)):
            assert got.shape == true[:, start:stop].shape
            wanted = true[:, start:stop]
            # Steps and ends are stored in float16.
            allowed = half_steps(wanted, bits) + 4e-3 if bits < 16 else torch.zeros_like(wanted)
            assert ((got - wanted).abs() <= allowed).all()
    assert dataclasses.is_dataclass(method)
    if key_bits != 16:
        (steps,) = method.key_steps(packed)
        assert steps.index.shape == (6, 13, 1) and steps.levels.shape == (6, 13, -(-head_dim // 64))


def half_steps(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What rounding between the ends of each group of 64 channels may be off by, from the formula in float64."""
    halves = []
    for group in x.double().split(64, dim=-1):
        step = (group.amax(-1, keepdim=True) - group.amin(-1, keepdim=True)) / (2**bits - 1)
        halves.append((step / 2).expand_as(group))
    return torch.cat(halves, -1)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 2), (4, 16), (16, 2)])
def test_layout_of_the_guide(minmax, key_bits, value_bits):
    (code,) = re.findall(r"   ```python\n(   def _minmax.*?)   ```", read("developer-guide.md"), re.DOTALL)
    names = dict(vars(layouts))
    exec(textwrap.dedent(code), names)  # noqa: S102
    settings = CacheSettings(key_bits=key_bits, value_bits=value_bits)
    planned = names["_minmax"](settings, 13, 80, LayerState())
    packed = minmax(settings).encode(*torch.randn(2, 1, 13, 1, 80).unbind(0), QueryStats(), LayerState())
    stored = storage_bytes(t for name, t in packed.tensors.items() if not name.endswith("_raw"))
    assert planned.total() == stored


def test_saved_span_of_the_guide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example(EXAMPLE_SPAN, "guide_span", tmp_path)
    assert main(["inspect", "span.safetensors"]) == 0
    assert "48 tokens, 4 heads x 64" in capsys.readouterr().out


def test_conversation_of_the_guide(tmp_path):
    module = example(EXAMPLE_CONVERSATION, "guide_conversation", tmp_path)
    assert module.record["tokens"] == 144 and module.record["ratio_resident"] > 1
    plain = module.WorldCache(CacheSettings(key_bits=16, value_bits=16), module.CacheGeometry(2, 4, 64))
    given = [[torch.randn(3, 1, 48, 4, 64).unbind(0) for _ in range(2)] for _ in range(2)]
    module.block(plain, given[0])
    out = module.layer_forward(plain, 1, *given[1][1], clean=False)
    q, k, v = given[1][1]
    both = (torch.cat((old, new), 1) for old, new in zip(given[0][1][1:], (k, v)))
    assert torch.allclose(out, module.attention(q, *both), atol=1e-6)
