"""The template for long videos on the tiny world, in a real server: its window rolls, and its camera turns back."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from benchmarks.demo import node_of, record_in
from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt
from support.prompts import LATENT_NODE, without_cache_nodes

TEMPLATE = ROOT / "workflows" / "long-tiny-world.json"
TOKENS = 96
SEEDED = 21


@pytest.fixture(scope="module")
def template(server) -> dict:
    """The template as a prompt, with its latent saved."""
    prompt = to_api_prompt(json.loads(TEMPLATE.read_text()), server.object_info())
    output = [node_of(prompt, "SamplerCustomAdvanced"), 0]
    prompt[LATENT_NODE] = {"class_type": "SaveLatent", "inputs": {"samples": output, "filename_prefix": "test"}}
    return prompt


def changed(template: dict, **inputs) -> dict:
    """The prompt with widget values replaced, by input name, wherever they are values."""
    prompt = copy.deepcopy(template)
    for node in prompt.values():
        for name in inputs.keys() & node["inputs"].keys():
            if not isinstance(node["inputs"][name], list):
                node["inputs"][name] = inputs[name]
    return prompt


def test_it_runs_with_the_weights_of_the_pack(server, template):
    """K2V2: 13 blocks behind the seed frames; sink, window and nothing more stay in reach."""
    entry = server.run(template)
    record = record_in("\n".join(entry["outputs"][node_of(template, "QuantWMCacheStats")]["text"]))
    assert (record["key_bits"], record["value_bits"], record["blocks"]) == (2, 2, 7 + 13)
    assert record["tokens"] == (3 + 18) * TOKENS
    (video,) = entry["outputs"][node_of(template, "SaveVideo")]["images"]
    assert video["filename"].endswith(".mp4")


def test_off_equals_the_host_and_the_change_begins_at_its_block(server, template, sample):
    off = changed(template, method="off", length=33, from_block=3)
    latents = [sample(server, each) for each in (off, without_cache_nodes(off))]
    assert torch.equal(*latents) and latents[0].isfinite().all()
    straight = sample(server, changed(off, from_block=99))
    same = (straight == latents[0]).all(dim=(0, 1, 3, 4))
    assert same[: SEEDED + 6].all() and not same[SEEDED + 6 :].any()
