"""Every template becomes a prompt that the server's own node definitions accept."""

import json

import pytest

from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt

FILES = sorted((ROOT / "workflows").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_server_knows_every_input(server, file):
    info = server.object_info()
    for node in to_api_prompt(json.loads(file.read_text()), info).values():
        spec = info[node["class_type"]]["input"]
        required = {name for name in spec.get("required", {}) if name in node["inputs"]}
        assert required == spec.get("required", {}).keys(), node["class_type"]
        for name, value in node["inputs"].items():
            options = {**spec.get("required", {}), **spec.get("optional", {})}[name][1:]
            choices = options[0].get("options") if options else None
            # File names depend on the machine; dynamic choices are objects.
            if choices and isinstance(choices[0], str) and not str(value).endswith(".safetensors"):
                assert value in choices, f"{node['class_type']}.{name}"
