"""The blueprints in subgraphs/: made of the templates of today, and sound inside."""

import json

import pytest

from benchmarks.host import ROOT
from scripts.make_blueprints import BLUEPRINTS, FOLDER, INPUT_SIDE, NAME, OUTPUT_SIDE, build


@pytest.fixture(params=BLUEPRINTS, ids=lambda blueprint: blueprint.model)
def definition(request) -> dict:
    return build(request.param)["definitions"]["subgraphs"][0]


def test_files_are_what_the_templates_give():
    assert {path.name for path in FOLDER.glob("*")} == {f"{NAME} ({blueprint.model}).json" for blueprint in BLUEPRINTS}
    for blueprint in BLUEPRINTS:
        saved = json.loads(blueprint.path.read_text(encoding="utf-8"))
        assert saved == build(blueprint), "run python -m scripts.make_blueprints"


def test_every_model_with_a_template_has_one():
    templates = {path.stem for path in (ROOT / "workflows").glob("*.json")}
    # Comparisons, long rollouts and continuations are variations of a model's first template.
    variations = {
        name for name in templates if name.startswith("compare-") or "long-" in name or name.endswith("-continuation")
    }
    assert {blueprint.template for blueprint in BLUEPRINTS} == templates - variations


def test_links_join_what_they_name(definition):
    nodes = {node["id"]: node for node in definition["nodes"]}
    ids = [link["id"] for link in definition["links"]]
    assert len(set(ids)) == len(ids)
    for link in definition["links"]:
        if link["origin_id"] == INPUT_SIDE:
            origin = definition["inputs"][link["origin_slot"]]
            assert link["id"] in origin["linkIds"]
        else:
            origin = nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
            assert link["id"] in origin["links"]
        if link["target_id"] == OUTPUT_SIDE:
            target = definition["outputs"][link["target_slot"]]
            assert target["linkIds"] == [link["id"]]
        else:
            target = nodes[link["target_id"]]["inputs"][link["target_slot"]]
            assert target["link"] == link["id"]
        assert link["type"] == origin["type"] and link["type"] in target["type"].split(",")
    for node in nodes.values():
        assert all(entry["link"] in (None, *ids) for entry in node["inputs"])
        assert all(link in ids for output in node["outputs"] for link in output["links"])


def test_every_input_leads_inside_and_the_cache_comes_out(definition):
    assert all(entry["linkIds"] for entry in definition["inputs"])
    assert {"frames", "cache"} <= {entry["name"] for entry in definition["outputs"]}
