"""What a registry, another pack or a user's torch would trip over, checked on the files themselves."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.host import ROOT, comfyui_path

PACK_FOLDERS = ("nodes", "quantwm_core", "kernels", "world_models")
CODE_FOLDERS = (*PACK_FOLDERS, "benchmarks", "scripts", "tests", "training")
NEVER_REQUIRED = re.compile(r"^(torch|triton|xformers|numpy|quant-?videogen)", re.IGNORECASE)
RAW_LAYERS = re.compile(r"(Linear|Conv[123]d|ConvTranspose[123]d|LayerNorm|GroupNorm|RMSNorm|Embedding)$")
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
ISOLATED_IMPORT = """
import importlib, pkgutil, sys
import torch  # looks for triton itself

FOREIGN = {"comfy", "comfy_api", "comfy_extras", "comfy_kitchen", "folder_paths", "nodes", "triton"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FOREIGN:
            raise ImportError(f"quantwm_core must not import {name}")

sys.meta_path.insert(0, Blocker())
import quantwm_core
for module in pkgutil.walk_packages(quantwm_core.__path__, "quantwm_core."):
    importlib.import_module(module.name)
"""


def python_files(*folders: str) -> list[Path]:
    return [
        ROOT / "__init__.py",
        *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))),
    ]


def imports_of(path: Path) -> Iterator[str]:
    """Modules that a file imports absolutely."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def forbidden_calls(path: Path) -> Iterator[str]:
    """What ComfyUI packs must not use: fixed devices, autocast, layers that skip the host's casting."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            arguments = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if node.func.attr == "cuda":
                yield f"{where} .cuda()"
            if node.func.attr == "to" and any(str(a).startswith("cuda") for a in arguments):
                yield f"{where} .to('cuda')"
            if node.func.attr == "basicConfig":
                yield f"{where} logging.basicConfig"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner == "torch" and node.attr == "autocast":
                yield f"{where} torch.autocast"
            if owner in ("nn", "torch.nn") and RAW_LAYERS.match(node.attr):
                yield f"{where} {owner}.{node.attr}"


def node_ids() -> list[str]:
    """Ids of all nodes of the pack, read from their schemas."""
    found = []
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "node_id" and isinstance(node.value, ast.Constant):
                found.append(node.value.value)
    return found


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def project() -> dict:
    """The pack's pyproject.toml as ComfyUI's own parser reads it."""
    code = (
        "from comfy_config.config_parser import extract_node_configuration as read; "
        f"print(read({str(ROOT)!r}).model_dump_json())"
    )
    result = run_python(code, comfyui_path())
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_comfyui_reads_the_project_file(project):
    assert project["project"]["name"] == "quantwm"
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert project["project"]["license"]["text"] == "Apache-2.0"
    assert project["project"]["urls"]["repository"].startswith("https://")
    assert project["project"]["supported_comfyui_version"] == ">=0.30.0"
    assert project["project"]["supported_os"] == ["OS Independent"]
    assert "GPU :: NVIDIA CUDA" in project["project"]["supported_accelerators"]
    assert project["tool_comfy"]["publisher_id"] == "quantwm"
    assert project["tool_comfy"]["display_name"] == "QuantWM"
    name = project["project"]["name"]
    # Rules of the registry: it becomes the folder's name, and the product's own name in it is advised against.
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,99}", name) and "comfyui" not in name
    assert 20 < len(project["project"]["description"]) < 200
    # WEB_DIRECTORY names it already; named twice, ComfyUI would load every script twice.
    assert not project["tool_comfy"]["web"]


def git_files(*options: str) -> set[str]:
    command = ["git", "-c", "core.quotePath=off", "ls-files", *options]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


def published_files() -> set[str]:
    """What `comfy node publish` packs: files that git tracks, less those in .comfyignore, whose syntax is git's."""
    return git_files() - git_files("-ci", "--exclude-from=.comfyignore")


def test_the_published_pack_has_all_that_runs_and_nothing_else():
    files = published_files()
    folders = {"nodes", "quantwm_core", "kernels", "world_models", "workflows", "subgraphs", "web", "locales"}
    alone = {"__init__.py", "pyproject.toml", "requirements.txt", "README.md", "CHANGELOG.md", "LICENSE"}
    assert {name.partition("/")[0] for name in files} == folders | alone
    assert {name for name in git_files() if name.partition("/")[0] in folders} <= files


def test_what_comfy_node_validate_runs_finds_nothing():
    """Its own command (comfy-cli, custom_nodes/command.py): exec, eval, several statements in a line."""
    command = [sys.executable, "-m", "ruff", "check", ".", "-q", "--select", "S102,S307,E702", "--exit-zero"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_published_pack_has_what_is_read_as_a_file():
    files = published_files()
    for script in (name for name in files if name.startswith("web/js/") and name.endswith(".js")):
        for target in re.findall(r'from "\./([\w.]+)"', (ROOT / script).read_text(encoding="utf-8")):
            assert f"web/js/{target}" in files, script
    assert {"web/js/memory_view.css", "quantwm_core/presets.json"} <= files


def test_the_published_pack_loads(tmp_path):
    """By path and from its own files alone, as ComfyUI loads it."""
    pack = tmp_path / "quantwm"
    for name in published_files():
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        (pack / name).symlink_to(ROOT / name)
    code = (
        "import asyncio, sys; from pathlib import Path; from benchmarks.host import import_folder, start_host; "
        f"start_host(cpu=True); pack = import_folder('published', Path({str(pack)!r})); "
        "nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list()); "
        "print([node.GET_SCHEMA().node_id for node in nodes])"
    )
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr
    assert sorted(ast.literal_eval(result.stdout.splitlines()[-1])) == sorted(set(node_ids()))


def test_changelog_has_the_version(project):
    assert f"## {project['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_banner_is_21_to_9():
    # ComfyUI's parser knows no such key; the registry's own does.
    assert re.search(r'^Banner = "https://.+/assets/banner\.png"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    with Image.open(ROOT / "assets" / "banner.png") as banner:
        assert banner.width * 9 == banner.height * 21


def test_publishing_needs_a_new_version_and_the_publishers_key():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    for needed in ("paths: [pyproject.toml]", "publish-node-action", "secrets.REGISTRY_ACCESS_TOKEN"):
        assert needed in text


def test_icon_is_square_and_small_enough(project):
    assert project["tool_comfy"]["icon"].endswith("/assets/icon.png")
    with Image.open(ROOT / "assets" / "icon.png") as icon:
        assert icon.width == icon.height <= 400


def test_nothing_is_required_that_could_replace_torch(project):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert not [name for name in required + project["project"]["dependencies"] if NEVER_REQUIRED.match(name)]


def test_installing_the_requirements_replaces_nothing(tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=os.name != "nt")
    python = next(path for path in (tmp_path / "env").glob("*/python*") if path.stem == "python")
    packages = next((tmp_path / "env").glob("[lL]ib/**/site-packages"))
    (packages / "torch-99.0.dist-info").mkdir()
    (packages / "torch-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--no-index"]
    result = subprocess.run([*command, "-r", str(ROOT / "requirements.txt")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Would install" not in result.stdout and "Would uninstall" not in result.stdout


def test_core_imports_without_comfy_and_triton():
    result = run_python(ISOLATED_IMPORT, ROOT)
    assert result.returncode == 0, result.stderr


def test_core_depends_on_torch_alone():
    allowed = {*sys.stdlib_module_names, "torch", "safetensors"}
    for path in python_files("quantwm_core")[1:]:
        assert {name.split(".")[0] for name in imports_of(path)} <= allowed, path


@pytest.mark.parametrize("path", python_files(*PACK_FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_pack_file(path):
    """ComfyUI loads the pack by path, so that its own modules are there by relative imports only."""
    own = {"quantwm_core", "kernels", "world_models", "benchmarks", "tests"}
    outside = {"subprocess", "requests", "urllib", "socket", "pip"}
    for name in imports_of(path):
        assert name.split(".")[0] not in own and not name.startswith("nodes."), f"absolute import of {name}"
        assert name.split(".")[0] not in outside, f"{name} has no business in a node pack"
    assert not list(forbidden_calls(path))


def test_python_files_are_ascii():
    assert not [path for path in python_files(*CODE_FOLDERS) if not path.read_bytes().isascii()]


def test_every_node_has_a_help_page():
    assert node_ids()
    pages = ROOT / "web" / "docs"
    missing = [
        name for name in node_ids() if not any((pages / page).is_file() for page in (f"{name}.md", f"{name}/en.md"))
    ]
    assert not missing


def test_there_is_one_template_folder():
    """ComfyUI lists every template folder of a pack, and serves the files of only one."""
    names = ("example_workflows", "example", "examples", "workflow", "workflows")
    assert [name for name in names if (ROOT / name).exists()] == ["workflows"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_a_thumbnail_and_known_owners(path):
    workflow = json.loads(path.read_text())
    with Image.open(path.with_suffix(".jpg")) as thumbnail:
        assert thumbnail.format == "JPEG"
    graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]
    for node in (node for graph in graphs for node in graph["nodes"]):
        if node["type"] in node_ids():
            assert node["properties"]["cnr_id"] == "quantwm", node["type"]


def test_weights_fit_a_plain_git_repository():
    assert not [path for path in ROOT.glob("world_models/**/*.safetensors") if path.stat().st_size >= 16_000_000]
