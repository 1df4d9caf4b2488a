"""`python -m quantwm_core`, as a person calls it and function by function."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.host import ROOT
from quantwm_core import METHODS, CacheSettings
from quantwm_core.command_line import PLAN_EXAMPLES, main
from quantwm_core.inspection import inspect_file
from quantwm_core.methods import LayerState, build_method
from quantwm_core.query_stats import QueryStats, second_moment
from quantwm_core.span import storage_bytes

# Python imports this at start-up; the path finder then has none of these, as on a machine without them.
WITHOUT_HOST = """
from importlib.machinery import PathFinder

MISSING = ("comfy", "comfy_api", "triton", "safetensors")
find_spec = PathFinder.find_spec


def without(name, path=None, target=None):
    return None if name.partition(".")[0] in MISSING else find_spec(name, path, target)


PathFinder.find_spec = without
"""


def saved_span(folder, method: str = "quantwm", bits: tuple[int, int] = (2, 4)):
    """A span of 70 tokens, 3 heads of 40 and batch 2, and the file it was saved in."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(2, 70, 3, 40, generator=generator).bfloat16() for _ in range(3))
    moment = second_moment(q)
    span = build_method(CacheSettings(method, *bits)).encode(k, v, QueryStats(moment, moment), LayerState())
    tensors, metadata = span.to_savable()
    path = folder / f"{method}.safetensors"
    save_file(tensors, path, metadata)
    return span, path


@pytest.mark.parametrize("method", [method for method in METHODS if method != "off"])
def test_inspect_tells_what_was_saved(tmp_path, capsys, method):
    span, path = saved_span(tmp_path, method, (16, 4) if method == "qvg" else (2, 4))
    saved = inspect_file(path)
    assert sum(saved.bytes_by_part.values()) == storage_bytes(t.contiguous() for t in span.tensors.values())
    assert {t.name: t.shape for t in saved.tensors} == {n: tuple(t.shape) for n, t in span.tensors.items()}
    assert saved.batch == 2 and saved.elements == 2 * 2 * 70 * 3 * 40
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"method {method}, keys {span.key_bits} bit, values 4 bit" in text
    assert "70 tokens, 3 heads x 40, batch 2" in text


def broken_files(folder):
    """(file, words of the complaint)"""
    span, path = saved_span(folder)
    tensors, metadata = span.to_savable()
    cut, plain, odd, other = (folder / f"{name}.safetensors" for name in ("cut", "plain", "odd", "other"))
    cut.write_bytes(path.read_bytes()[:200])
    save_file(tensors, plain)
    save_file(tensors, odd, metadata | {"tokens": "many"})
    save_file(tensors | {"weight": torch.zeros(2, 3)}, other, metadata)
    huge = folder / "huge.safetensors"
    huge.write_bytes((1 << 60).to_bytes(8, "little") + json.dumps({}).encode())
    yield cut, "cut off"
    yield huge, "safetensors format"
    yield plain, "metadata without method"
    yield odd, "tokens 'many'"
    yield other, "weight"
    yield folder, "readable"
    yield folder / "nothing", "Check the path"


def test_inspect_refuses_other_files(tmp_path, capsys):
    for path, words in broken_files(tmp_path):
        assert main(["inspect", str(path)]) == 1
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: ") and words in err and str(path) in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget", "0"], "budget must be more than 0"),
        (["--budget", "nan"], "budget"),
        (["--budget", "inf"], "budget"),
        (["--width", "0"], "Raise --width"),
        (["--head-dim", "-1"], "Raise --head-dim"),
        (["--length", "0"], "length must be at least 1"),
        (["--block", "65"], "from 1 to 64"),
        (["--length", "9000", "--budget", "1"], "Raise the budget"),
    ],
)
def test_plan_refuses_in_one_line(capsys, options, words):
    assert main(["plan", *options]) == 1
    out, err = capsys.readouterr()
    assert not out and words in err and err.count("\n") == 1


def test_plan_of_another_shape(capsys):
    assert main("plan --layers 48 --heads 32 --head-dim 128 --length 73 --block 19".split()) == 0
    text = capsys.readouterr().out
    # The README's table: LongCat in one span.
    assert "48 layers x 32 heads x 128" in text and "21.7 GiB" in text and "nothing fits" not in text


def test_runs_as_a_module_without_comfyui_triton_and_safetensors(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HOST)
    _, path = saved_span(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "quantwm_core", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)

    planned, seen, wrong = run("plan", "--budget", "2"), run("inspect", str(path)), run("inspect", "nothing")
    for done in (planned, seen):
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and "Traceback" not in wrong.stderr


def test_help_has_examples_that_run(capsys):
    for command in ([], ["plan"], ["inspect"], ["bench"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "python -m" in capsys.readouterr().out
    for line in PLAN_EXAMPLES.splitlines()[1:]:
        assert main(line.split()[3:]) == 0
    assert main(["bench"]) == 0 and "benchmarks.memory" in capsys.readouterr().out
