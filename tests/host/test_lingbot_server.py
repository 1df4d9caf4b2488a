"""The LingBot-World templates in a real ComfyUI server, on a small checkpoint with random weights."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

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
LONG_TEMPLATE = ROOT / "workflows" / "lingbot-v2-long-world-retrieval.json"
WIDTH, HEIGHT, TOKENS = 64, 48, 12
BLOCKS, WINDOW = 15, 18
LENGTH = 4 * (4 * BLOCKS - 1) + 1
LONG_LENGTH = 317  # of the long template: 20 blocks


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
    return small_prompt(models, TEMPLATE)


@pytest.fixture(scope="module")
def long_template(models) -> dict:
    return small_prompt(models, LONG_TEMPLATE)


def small_prompt(models: ComfyServer, file: Path) -> dict:
    """A template as a prompt, small: the text encoder stood in for, its latent saved."""
    prompt = to_api_prompt(json.loads(file.read_text()), models.object_info())
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


def test_long_template_brings_blocks_back_while_its_window_rolls(models, long_template):
    """K2V2, 20 blocks: of the sink's block and the newest one everything else is in the bank."""
    entry = models.run(changed(long_template, length=LONG_LENGTH, method="quantwm"))
    record = record_in("\n".join(entry["outputs"][node_of(long_template, "QuantWMCacheStats")]["text"]))
    assert (record["key_bits"], record["value_bits"], record["blocks"]) == (2, 2, 20)
    assert record["tokens"] == 80 * TOKENS and record["blocks_in_bank"] == 18
    assert 0 < record["bytes_bank"] < record["bytes_packed"]
    (video,) = entry["outputs"][node_of(long_template, "SaveVideo")]["images"]
    assert video["filename"].endswith(".mp4")


def test_long_template_off_and_what_comes_back(models, long_template, sample):
    """`off` is bit-equal to a graph without our cache nodes; what comes back changes the frames after it left."""
    short = {"length": 4 * 39 + 1, "noise_seed": 3, "keyframes": "0 0 0 0 0\n78 0 0 0 120\n156 0 0 0 0"}
    off = changed(long_template, method="off", **short)
    latents = [sample(models, each) for each in (off, without_cache_nodes(off))]
    assert torch.equal(*latents) and latents[0].isfinite().all()
    forgetful = sample(models, changed(long_template, method="off", retrieval="off", **short))
    same = (forgetful == latents[0]).all(dim=(0, 1, 3, 4))
    assert same[:12].all() and not same[12:].any()
    packed = sample(models, changed(long_template, method="quantwm", **short))
    assert packed.isfinite().all() and not torch.equal(packed, latents[0])


def test_causal_pretrain_in_a_graph(models, long_template, sample):
    """CFG Guider with both prompts; two caches are counted. Few steps, as the weights are random."""
    prompt = changed(long_template, length=29, version="v2 causal-pretrain", window=0, sink=0, retrieval="off")
    conditioning, guider = (node_of(prompt, kind) for kind in ("QuantWMLingBotConditioning", "BasicGuider"))
    inputs = prompt[guider]["inputs"]
    prompts = {"positive": [conditioning, 0], "negative": [conditioning, 4], "cfg": 5.0, "model": inputs["model"]}
    prompt[guider] = {"class_type": "CFGGuider", "inputs": prompts}
    sampler = prompt[node_of(prompt, "SamplerCustomAdvanced")]["inputs"]
    prompt["few"] = {"class_type": "SplitSigmas", "inputs": {"sigmas": sampler["sigmas"], "step": 36}}
    sampler["sigmas"] = ["few", 1]
    entry = models.run(prompt)
    report = "\n".join(entry["outputs"][node_of(prompt, "QuantWMCacheStats")]["text"])
    record = record_in(report)
    assert record["conditionings"] == 2 and record["tokens"] == 8 * TOKENS
    assert "for each of 2 conditionings (cfg)" in report
