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
        # Slots of an input that grows are named behind it: images.image0, images.image1.
        given = {name.partition(".")[0] for name in node["inputs"]}
        required = {name for name in spec.get("required", {}) if name in given}
        assert required == spec.get("required", {}).keys(), node["class_type"]
        for name, value in node["inputs"].items():
            options = {**spec.get("required", {}), **spec.get("optional", {})}[name.partition(".")[0]][1:]
            choices = options[0].get("options") if options else None
            # File names depend on the machine; dynamic choices are objects.
            if choices and isinstance(choices[0], str) and not str(value).endswith(".safetensors"):
                assert value in choices, f"{node['class_type']}.{name}"
