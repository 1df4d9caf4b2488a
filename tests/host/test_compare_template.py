"""Compare Worlds in a real server: its template, its numbers against the pictures that were saved, its refusals."""

from __future__ import annotations

import io
import json

import av
import numpy as np
import pytest
from PIL import Image

from benchmarks.demo import node_of, record_in
from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt
from support.server import PromptFailed

TEMPLATE = ROOT / "workflows" / "compare-tiny-world.json"
GIVEN, LENGTH = 6, 12


@pytest.fixture(scope="module")
def prompt(server) -> dict:
    """The template, short, with both videos saved as PNG."""
    prompt = to_api_prompt(json.loads(TEMPLATE.read_text()), server.object_info())
    prompt[node_of(prompt, "QuantWMTinyWorldSeed")]["inputs"] |= {"seed_frames": GIVEN, "length": LENGTH}
    compare = prompt[node_of(prompt, "QuantWMCompare")]["inputs"]
    for name in ("reference", "compared"):
        prompt[name] = {
            "class_type": "SaveImage",
            "inputs": {"images": compare[name], "filename_prefix": f"test/{name}"},
        }
    return prompt


def pictures(server, references: list[dict]) -> np.ndarray:
    """Saved frames, float64 `[T, H, W, 3]` in 0..1."""
    saved = [Image.open(io.BytesIO(server.file(each))).convert("RGB") for each in references]
    return np.stack([np.asarray(picture, np.float64) / 255 for picture in saved])


def test_template_measures_what_was_painted(server, prompt):
    events = []
    outputs = server.wait(server.queue(prompt), events.append)["outputs"]
    node = node_of(prompt, "QuantWMCompare")
    report = outputs[node]["text"][0]
    record = record_in(report)
    reference, compared = (pictures(server, outputs[name]["images"]) for name in ("reference", "compared"))
    assert record["frames"] == LENGTH and record["psnr_each"][:GIVEN] == [100] * GIVEN
    each = -10 * np.log10(((reference - compared) ** 2).mean((1, 2, 3))[GIVEN:])
    # The saved pictures are rounded to 8 bits, the measured ones are not.
    assert record["psnr_each"][GIVEN:] == pytest.approx(list(each), abs=0.5)
    assert 20 < record["psnr"] < 90 and 0.8 < record["ssim"] < 1 and record["flicker"] > 0
    assert "2 bits against full precision" in report and f"{GIVEN} are equal" in report
    assert server.file(outputs[node]["images"][0])[:4] == b"\x89PNG"
    texts = [event["data"] for event in events if event["type"] == "progress_text"]
    assert any(data["node"] == node and data["text"].startswith("PSNR") for data in texts)
    (video,) = outputs[node_of(prompt, "SaveVideo")]["images"]
    with av.open(io.BytesIO(server.file(video))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == LENGTH and frames[0].shape[1] == 3 * reference.shape[2] + 8


def test_sizes_that_differ_are_refused_with_the_remedy(server, prompt):
    prompt = json.loads(json.dumps(prompt))
    compare = prompt[node_of(prompt, "QuantWMCompare")]["inputs"]
    prompt["small"] = {
        "class_type": "ImageScale",
        "inputs": {
            "image": compare["compared"],
            "upscale_method": "area",
            "width": 96,
            "height": 64,
            "crop": "disabled",
        },
    }
    compare["compared"] = ["small", 0]
    with pytest.raises(PromptFailed, match=r"192 x 128 and 96 x 64\. Bring one .* Upscale Image"):
        server.run(prompt)
