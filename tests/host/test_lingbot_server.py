"""The LingBot-World template in a real ComfyUI server, on a small checkpoint with random weights."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.demo import node_of, record_in
from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt
from support.prompts import LATENT_NODE, without_cache_nodes
from support.server import ComfyServer, PromptFailed

TEMPLATE = ROOT / "workflows" / "lingbot-v2-image-to-world.json"
WIDTH, HEIGHT, TOKENS = 64, 48, 12
BLOCKS, WINDOW = 15, 18
LENGTH = 4 * (4 * BLOCKS - 1) + 1


@pytest.fixture(scope="module")
def models(server) -> ComfyServer:
    """The server with the small checkpoint, its VAE, a picture and pose files in its folders."""
    command = [sys.executable, "-m", "benchmarks.small_lingbot", str(server.folder / "models")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save(server.folder / "input" / "example.png")
    poses = server.folder / "input" / "poses"
    poses.mkdir()
    np.save(poses / "poses.npy", np.tile(np.eye(4, dtype=np.float32), (29, 1, 1)))
    return server


@pytest.fixture(scope="module")
def template(models) -> dict:
    """The template as a prompt, small: the text encoder stood in for, its latent saved."""
    info = models.object_info()
    prompt = to_api_prompt(json.loads(TEMPLATE.read_text()), info)
    loader = prompt[node_of(prompt, "QuantWMLoadWorldModel")]["inputs"]
    loader["model_name"] = "lingbot-world-v2-1.3b-causal-fast/model-00001-of-00002.safetensors"
    text = node_of(prompt, "CLIPTextEncode")
    motion = {"turn_rate": 18.0, "orbit": 0.2, "orbit_phase": 0.0}
    prompt[text] = {"class_type": "QuantWMTinyWorldConditioning", "inputs": motion}
    del prompt[node_of(prompt, "CLIPLoader")]
    output = [node_of(prompt, "SamplerCustomAdvanced"), 0]
    prompt[LATENT_NODE] = {"class_type": "SaveLatent", "inputs": {"samples": output, "filename_prefix": "test"}}
    return prompt


def changed(template: dict, **inputs) -> dict:
    """The prompt with widget values replaced, by input name, wherever they are values."""
    prompt = copy.deepcopy(template)
    for node in prompt.values():
        for name, value in ({"width": WIDTH, "height": HEIGHT, "length": 29} | inputs).items():
            if name in node["inputs"] and not isinstance(node["inputs"][name], list):
                node["inputs"][name] = value
    return prompt


def test_parts_are_listed_as_one_checkpoint(models):
    (options,) = models.object_info()["QuantWMLoadWorldModel"]["input"]["required"]["model_name"][1:]
    parts = [name for name in options["options"] if "lingbot" in name]
    assert parts == ["lingbot-world-v2-1.3b-causal-fast/model-00001-of-00002.safetensors"]


def test_template_rolls_its_window_for_ten_blocks_and_more(models, template):
    """K2V2; the window of 18 is full in the fifth block of 15."""
    entry = models.run(changed(template, length=LENGTH, method="quantwm"))
    record = record_in("\n".join(entry["outputs"][node_of(template, "QuantWMCacheStats")]["text"]))
    assert (record["key_bits"], record["value_bits"], record["blocks"]) == (2, 2, BLOCKS)
    assert record["tokens"] == WINDOW * TOKENS
    pictures = entry["outputs"][node_of(template, "PreviewImage")]["images"]
    assert models.file(pictures[0])[:4] == b"\x89PNG"
    (video,) = entry["outputs"][node_of(template, "SaveVideo")]["images"]
    assert video["filename"].endswith(".mp4")


def test_off_equals_a_graph_without_our_cache_nodes(models, template, sample):
    off = changed(template, method="off", noise_seed=3)
    latents = [sample(models, each) for each in (off, without_cache_nodes(off))]
    assert torch.equal(*latents) and latents[0].isfinite().all()
    assert latents[0].shape == (1, 16, 8, HEIGHT // 8, WIDTH // 8)
    packed = sample(models, changed(template, method="quantwm", noise_seed=3))
    assert packed.isfinite().all() and not torch.equal(packed, latents[0])
    assert not [line for line in models.log().splitlines() if "missing" in line.lower() and "keys" in line.lower()]


def test_the_camera_moves_the_picture(models, template, sample):
    still, turning = (
        sample(models, changed(template, motion="pan", angle=angle, noise_seed=3)) for angle in (0.0, 90.0)
    )
    assert still.isfinite().all() and turning.isfinite().all() and not torch.equal(still, turning)


def test_a_picture_of_another_shape_is_refused(models, template):
    prompt = changed(template)
    conditioning = prompt[node_of(prompt, "QuantWMLingBotConditioning")]["inputs"]
    conditioning["start_image"] = [node_of(prompt, "LoadImage"), 0]
    conditioning["width"] = 128
    with pytest.raises(PromptFailed, match=r"start_image is 640 x 480 \(aspect 1.33\) and the video 128 x 48 \(2.67\)"):
        models.run(prompt)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"length": 9}, "at least 13 frames long"),
        ({"motion": "files", "folder": "nowhere"}, "folder must be the name of a folder inside of ComfyUI's input"),
        ({"motion": "files", "folder": "../models"}, "folder must be the name of a folder inside of ComfyUI's input"),
        ({"motion": "files", "folder": "poses", "length": 61}, "has 29 poses, one a frame, but length is 61"),
        ({"motion": "actions", "actions": "w-3, q-2"}, "'q' is no key"),
        ({"motion": "keyframes", "keyframes": "0 0 0"}, "cannot read '0 0 0'"),
        ({"window": 8, "sink": 6}, "a block of 4 latent frames needs a window of at least 10"),
        ({"window": 6, "sink": 6}, "window must be larger than sink"),
    ],
    ids=str,
)
def test_wrong_input_is_refused_at_its_node(models, template, inputs, message):
    with pytest.raises(PromptFailed, match=message):
        models.run(changed(template, **inputs))


def test_pose_files_run(models, template, sample):
    assert sample(models, changed(template, motion="files", folder="poses")).isfinite().all()
