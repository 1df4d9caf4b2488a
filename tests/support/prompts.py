"""The tiny-world template as a prompt for the HTTP API, and variations of it."""

from __future__ import annotations

import copy
import json

from benchmarks.demo import node_of
from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt

TEMPLATE = "tiny-world"
LATENT_NODE = "test_latent"


def tiny_world_prompt(object_info: dict, **inputs: object) -> dict:
    """The template, short (12 frames, 6 of them given) and with its latent saved.

    `inputs` replaces widget values, by input name, wherever a node has that input as a value.
    """
    workflow = json.loads((ROOT / "workflows" / f"{TEMPLATE}.json").read_text())
    prompt = to_api_prompt(workflow, object_info)
    for node in list(prompt.values()):
        for name, value in {"seed_frames": 6, "length": 12, **inputs}.items():
            if name in node["inputs"] and not isinstance(node["inputs"][name], list):
                node["inputs"][name] = value
    prompt[LATENT_NODE] = {
        "class_type": "SaveLatent",
        "inputs": {
            "samples": [node_of(prompt, "SamplerCustomAdvanced"), 0],
            "filename_prefix": "test",
        },
    }
    return prompt


def without_cache_nodes(prompt: dict) -> dict:
    """The same prompt as a user without the cache nodes would have it: the model goes straight on."""
    prompt = copy.deepcopy(prompt)
    apply_node = node_of(prompt, "QuantWMApply")
    model = prompt[apply_node]["inputs"]["model"]
    for kind in ("QuantWMApply", "QuantWMKVCache", "QuantWMCacheStats"):
        del prompt[node_of(prompt, kind)]
    for node in prompt.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] == apply_node:
                node["inputs"][name] = model
    return prompt


def with_world_sampler(prompt: dict, **inputs: object) -> dict:
    """The same prompt with World Sampler in the place of the host's sampler, a block of 3 frames at a time."""
    prompt = copy.deepcopy(prompt)
    values = {"frames_per_block": 3, "window": 0, "sink": 0, "context_noise": 0.0}
    prompt[node_of(prompt, "SamplerARVideo")] = {"class_type": "QuantWMWorldSampler", "inputs": values | inputs}
    return prompt
