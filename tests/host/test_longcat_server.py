"""The LongCat-Video templates in a real ComfyUI server, on a small checkpoint with random weights."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys

import av
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.demo import node_of, record_in
from benchmarks.host import ROOT
from benchmarks.small_longcat import LORA, OFFICIAL
from benchmarks.workflow_api import to_api_prompt
from support.prompts import LATENT_NODE, without_cache_nodes
from support.server import ComfyServer, PromptFailed

WIDTH, HEIGHT, TOKENS = 64, 48, 12
LENGTH, GIVEN, SEGMENTS = 21, 5, 11
CLIP_FRAMES = 9


@pytest.fixture(scope="module")
def models(server) -> ComfyServer:
    """The server with the small checkpoint, its VAE and LoRA, a picture and a clip in its folders."""
    command = [sys.executable, "-m", "benchmarks.small_longcat", str(server.folder / "models")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save(server.folder / "input" / "example.png")
    with av.open(str(server.folder / "input" / "example.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=15)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for shift in range(CLIP_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, 4 * shift, axis=1), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return server


def template(models: ComfyServer, name: str) -> dict:
    """A template as a prompt: the text encoder stood in for, its last latent saved."""
    workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text())
    prompt = to_api_prompt(workflow, models.object_info())
    for text in nodes_of(prompt, "CLIPTextEncode"):
        negative = prompt[text]["_meta"]["title"] == "What not to show"
        motion = {"turn_rate": 18.0, "orbit": 0.2, "orbit_phase": 90.0 if negative else 0.0}
        prompt[text] = {"class_type": "QuantWMTinyWorldConditioning", "inputs": motion}
    del prompt[node_of(prompt, "CLIPLoader")]
    last = nodes_of(prompt, "SamplerCustomAdvanced")[-1]
    prompt[LATENT_NODE] = {"class_type": "SaveLatent", "inputs": {"samples": [last, 0], "filename_prefix": "test"}}
    return prompt


@pytest.fixture(scope="module")
def image_to_video(models) -> dict:
    return template(models, "longcat-image-to-video")


@pytest.fixture(scope="module")
def continuation(models) -> dict:
    return template(models, "longcat-continuation")


def nodes_of(prompt: dict, kind: str) -> list[str]:
    return [name for name, node in prompt.items() if node["class_type"] == kind]


def changed(prompt: dict, **inputs) -> dict:
    """The prompt with widget values replaced, by input name, wherever they are values; small, and of two steps."""
    prompt = copy.deepcopy(prompt)
    small = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "given_frames": GIVEN, "steps": 2, "noise_seed": 3}
    for node in prompt.values():
        for name, value in (small | inputs).items():
            cuts = node["class_type"] == "ImageFromBatch"
            if not cuts and name in node["inputs"] and not isinstance(node["inputs"][name], list):
                node["inputs"][name] = value
    return prompt


def record_of(entry: dict, prompt: dict) -> dict:
    return record_in("\n".join(entry["outputs"][node_of(prompt, "QuantWMCacheStats")]["text"]))


def test_image_to_video_in_two_bits(models, image_to_video):
    entry = models.run(changed(image_to_video))
    record = record_of(entry, image_to_video)
    assert (record["key_bits"], record["value_bits"], record["tokens"]) == (2, 2, TOKENS)
    (video,) = entry["outputs"][node_of(image_to_video, "SaveVideo")]["images"]
    with av.open(io.BytesIO(models.file(video))) as file:
        assert sum(1 for _ in file.decode(video=0)) == LENGTH


def test_off_equals_a_graph_without_our_cache_nodes(models, image_to_video, sample):
    off = changed(image_to_video, method="off")
    latents = [sample(models, each) for each in (off, without_cache_nodes(off))]
    assert torch.equal(*latents) and latents[0].isfinite().all()
    assert latents[0].shape == (1, 16, 6, HEIGHT // 8, WIDTH // 8)
    packed = sample(models, changed(image_to_video))
    assert packed.isfinite().all() and not torch.equal(packed, latents[0])
    assert torch.equal(packed[:, :, 0], latents[0][:, :, 0])
    assert not [line for line in models.log().splitlines() if "missing" in line.lower() and "keys" in line.lower()]


def test_eleven_segments_from_a_clip(models, continuation):
    """Each caches the last frames of the one before; the clip and what they add make one video."""
    prompt = changed(continuation)
    assert len(nodes_of(prompt, "SamplerCustomAdvanced")) == SEGMENTS
    texts = []

    def note(event):
        if event["type"] == "progress_text" and "tokens cached" in event["data"]["text"]:
            texts.append(event["data"]["text"])

    entry = models.run(prompt, note)
    record = record_of(entry, prompt)
    assert (record["key_bits"], record["tokens"], record["blocks"]) == (2, 2 * TOKENS, 1)
    assert len(texts) >= SEGMENTS
    (video,) = entry["outputs"][node_of(prompt, "SaveVideo")]["images"]
    with av.open(io.BytesIO(models.file(video))) as file:
        assert sum(1 for _ in file.decode(video=0)) == CLIP_FRAMES + SEGMENTS * (LENGTH - GIVEN)


def test_official_checkpoint_and_lora(models, image_to_video, sample):
    """All parts of `dit/`, listed as one; the loader shows what its configurations say; the LoRA changes the video."""
    (options,) = models.object_info()["QuantWMLoadWorldModel"]["input"]["required"]["model_name"][1:]
    (name,) = [name for name in options["options"] if OFFICIAL in name]
    official = changed(image_to_video, model_name=name)
    shown = []

    def note(event):
        if event["type"] == "progress_text" and "LongCat-Video" in event["data"]["text"]:
            shown.append(event["data"]["text"])

    models.run(official, note)
    assert "shift 12 (scheduler_config.json)" in shown[0] and "attended (config.json)" in shown[0]
    assert torch.equal(sample(models, official), sample(models, changed(image_to_video)))
    apply = official[node_of(official, "QuantWMApply")]["inputs"]
    inputs = {"model": apply["model"], "lora_name": LORA, "strength": 1.0}
    with_lora = official | {"lora": {"class_type": "QuantWMLongCatLoRA", "inputs": inputs}}
    with_lora[node_of(official, "QuantWMApply")] = {
        "class_type": "QuantWMApply",
        "inputs": apply | {"model": ["lora", 0]},
    }
    distilled = changed(with_lora, schedule="distilled", cfg=1.0)
    assert not torch.equal(sample(models, distilled), sample(models, changed(official, schedule="distilled", cfg=1.0)))


def test_text_to_video(models, image_to_video, sample):
    prompt = changed(image_to_video)
    del prompt[node_of(prompt, "QuantWMLongCatConditioning")]["inputs"]["start_image"]
    assert sample(models, prompt).isfinite().all()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"width": 72}, "width must be a multiple of 16 up to 4096; got 72. Set it to 64"),
        ({"length": 20}, r"length must be 4 n \+ 1 \(1, 5, 9, ...\); got 20. Set it to 21"),
        ({"length": 1}, "given frames must be fewer than length, or nothing is left to make; got 1 of 1"),
        ({"schedule": "distilled", "steps": 51}, "the distilled schedule picks its steps from 50; got 51"),
        ({"jensen": "exact"}, "stores keys before RoPE"),
    ],
    ids=str,
)
def test_wrong_input_is_refused_at_its_node(models, image_to_video, inputs, message):
    with pytest.raises(PromptFailed, match=message):
        models.run(changed(image_to_video, **inputs))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"given_frames": 13}, "video has 9 frames, but given_frames asks for the last 13. Lower given_frames to 9"),
        ({"given_frames": 9, "length": 9}, "nothing is left to make; got 9 of 9"),
    ],
    ids=str,
)
def test_a_clip_that_does_not_fit(models, continuation, inputs, message):
    with pytest.raises(PromptFailed, match=message):
        models.run(changed(continuation, **inputs))


def test_picture_and_clip_at_once(models, continuation):
    prompt = changed(continuation)
    prompt["picture"] = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
    first = nodes_of(prompt, "QuantWMLongCatConditioning")[0]
    prompt[first]["inputs"]["start_image"] = ["picture", 0]
    with pytest.raises(PromptFailed, match="got both. Disconnect start_image or video"):
        models.run(prompt)
