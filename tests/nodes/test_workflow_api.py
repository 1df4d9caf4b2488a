"""The converter from editor workflows to API prompts, on small graphs with known answers."""

import pytest

from benchmarks.workflow_api import to_api_prompt, widget_values

INFO = {
    "Loader": {
        "display_name": "Load It",
        "input": {
            "required": {"name": [["a", "b"]]},
            "optional": {"device": ["COMBO", {"options": ["x", "y"]}]},
        },
        "input_order": {"required": ["name"], "optional": ["device"]},
    },
    "Sampler": {
        "display_name": "Sample",
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"default": 0}],
                "steps": ["INT", {"default": 20}],
                "text": ["STRING", {"forceInput": True}],
            }
        },
        "input_order": {"required": ["model", "seed", "steps", "text"]},
    },
    "Save": {
        "display_name": "Save",
        "input": {
            "required": {
                "codec": [
                    "COMFY_DYNAMICCOMBO_V3",
                    {
                        "options": [
                            {"key": "auto", "inputs": {"required": {}}},
                            {"key": "h264", "inputs": {"required": {"crf": ["INT", {"default": 23}]}}},
                        ]
                    },
                ],
                "prefix": ["STRING", {"default": "out"}],
            }
        },
        "input_order": {"required": ["codec", "prefix"]},
    },
}


def node(id, type, values=None, inputs=(), outputs=(), mode=0):
    return {
        "id": id,
        "type": type,
        "mode": mode,
        "widgets_values": values,
        "inputs": [{"name": name, "type": kind, "link": link} for name, kind, link in inputs],
        "outputs": [{"name": kind, "type": kind} for kind in outputs],
    }


def chain(*middle):
    """Loader 1 -> the given (node, input link, output link) -> Sampler 9, over links 1, 2, ..."""
    links = [[i + 1, 1 if i == 0 else middle[i - 1]["id"], 0, 0, 0, "MODEL"] for i in range(len(middle) + 1)]
    nodes = [
        node(1, "Loader", ["b", "y"], outputs=["MODEL"]),
        *middle,
        node(9, "Sampler", [5, "randomize", 4], [("model", "MODEL", len(links))]),
    ]
    return {"nodes": nodes, "links": links}


def test_values_by_name_and_links():
    prompt = to_api_prompt(chain(), INFO)
    assert prompt["1"] == {
        "class_type": "Loader",
        "inputs": {"name": "b", "device": "y"},
        "_meta": {"title": "Load It"},
    }
    assert prompt["9"]["inputs"] == {"model": ["1", 0], "seed": 5, "steps": 4}


def test_notes_and_muted_nodes_are_left_out():
    workflow = chain()
    workflow["nodes"] += [node(10, "MarkdownNote", ["hello"]), node(11, "Save", ["auto", "x"], mode=2)]
    assert to_api_prompt(workflow, INFO).keys() == {"1", "9"}


@pytest.mark.parametrize("kind", [("Reroute", 0), ("Unknown", 4)])
def test_reroutes_and_bypassed_nodes_are_followed(kind):
    between = node(5, kind[0], inputs=[("x", "MODEL", 1)], outputs=["MODEL"], mode=kind[1])
    prompt = to_api_prompt(chain(between), INFO)
    assert prompt.keys() == {"1", "9"} and prompt["9"]["inputs"]["model"] == ["1", 0]


def test_link_from_a_muted_node_is_no_input():
    workflow = chain()
    workflow["nodes"][0]["mode"] = 2
    assert "model" not in to_api_prompt(workflow, INFO)["9"]["inputs"]


def test_old_workflow_gets_defaults():
    assert widget_values(["b"], INFO["Loader"]) == {"name": "b", "device": "x"}
    assert widget_values([7, "fixed"], INFO["Sampler"]) == {"seed": 7, "steps": 20}


def test_dynamic_choice_and_values_by_name():
    assert widget_values(["auto", "a"], INFO["Save"]) == {"codec": "auto", "prefix": "a"}
    assert widget_values(["h264", 18, "a"], INFO["Save"]) == {"codec": "h264", "codec.crf": 18, "prefix": "a"}
    assert widget_values({"codec": "auto"}, INFO["Save"]) == {"codec": "auto"}


def test_unknown_node_is_named():
    workflow = chain()
    workflow["nodes"].append(node(12, "0f3c-a-subgraph"))
    with pytest.raises(ValueError, match="Node 12 is a 0f3c-a-subgraph.*unpack"):
        to_api_prompt(workflow, INFO)
