"""Make the pictures that the template browser shows, one beside each workflow.

    .venv/bin/python scripts/make_thumbnails.py [WORKFLOW ...]

The tiny world's show frames and numbers of a run that this script makes. Where weights have to be
downloaded, the picture lists the steps of the graph, read from the workflow file.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.demo import Run, node_of, record_in, run_prompt, with_settings  # noqa: E402
from benchmarks.host import load_pack, start_host  # noqa: E402
from benchmarks.server import comfy_server  # noqa: E402
from benchmarks.workflow_api import to_api_prompt  # noqa: E402

WORKFLOWS = ROOT / "workflows"
SIZE = 640
BACKGROUND, TEXT, MUTED = "#14161c", "#f2f4f8", "#aeb6c6"
BF16, PACKED = "#6b7387", "#5b9cff"
OURS = "QuantWM"


def tiny_world_picture(canvas_module, run: Run, given: int) -> Image.Image:
    """Four generated frames of a run, and what its cache took."""
    record, top = run.record, 462
    canvas = canvas_module.Canvas(SIZE, SIZE, BACKGROUND)
    canvas.text((28, top), f"{record['ratio_resident']:.1f}x smaller memory", TEXT, size=50, weight=0.8)
    shares = ((1.0, BF16, "BF16"), (1 / record["ratio_resident"], PACKED, "2 bits"))
    for i, (share, color, name) in enumerate(shares):
        y = top + 80 + 38 * i
        canvas.box((120, y, 120 + 492 * share, y + 26), color, radius=5)
        canvas.text((28, y + 13), name, MUTED, size=22, anchor="lm")
    picture = canvas.finished()
    generated = run.frames[given:]
    for i in range(4):
        frame = generated[i * (len(generated) - 1) // 3]
        picture.paste(frame.resize((317, 211), Image.Resampling.LANCZOS), (323 * (i % 2), 217 * (i // 2)))
    return picture


def comparison_picture(canvas_module, frames: list[Image.Image], record: dict) -> Image.Image:
    """Two moments of both videos, and how far they are apart; `frames` are side by side, as the node gives them."""
    canvas = canvas_module.Canvas(SIZE, SIZE, BACKGROUND)
    canvas.text((28, 462), f"{record['psnr']:.1f} dB PSNR", TEXT, size=50, weight=0.8)
    canvas.text((28, 532), f"SSIM {record['ssim']:.3f}, flicker {record['flicker']:.1f} of 255", MUTED, size=28)
    canvas.text((28, 584), "full precision on the left, 2 bits on the right", MUTED, size=26)
    picture = canvas.finished()
    width, height = 192, 128
    for row, index in enumerate((-10, -1)):
        for column in range(2):
            left, top = column * (width + 4), frames[index].height - height
            frame = frames[index].crop((left, top, left + width, top + height))
            picture.paste(frame.resize((317, 211), Image.Resampling.LANCZOS), (323 * column, 217 * row))
    return picture


def steps_picture(canvas_module, workflow: dict, name: str) -> Image.Image:
    """The groups of a workflow as steps; those that hold nodes of this pack stand out."""
    canvas = canvas_module.Canvas(SIZE, SIZE, BACKGROUND)
    title, subtitle = re.split("-(?=image|long|continuation)", name, maxsplit=1)
    canvas.text((28, 30), title.replace("-", " ").title(), TEXT, size=50, weight=0.8)
    canvas.text((28, 96), f"{subtitle.replace('-', ' ')}, cache in 2 bits", MUTED, size=28)
    groups = _steps(workflow["groups"])
    height = (SIZE - 190) / len(groups)
    for i, group in enumerate(groups):
        y = 160 + i * height
        color = PACKED if _holds_ours(workflow, group) else group["color"]
        canvas.box((28, y, SIZE - 28, y + height - 14), canvas_module.with_alpha(color, 0.55), radius=10)
        canvas.text((52, y + height / 2 - 7), group["title"], TEXT, size=32, anchor="lm")
    return canvas.finished()


def _steps(groups: list[dict]) -> list[dict]:
    """Groups in the order of their numbers; of those that repeat a step ("Segment 1" to "Segment 11"), the first alone,
    named for all."""
    repeated = [group for group in groups if not group["title"][0].isdigit()]
    steps = sorted((group for group in groups if group["title"][0].isdigit()), key=lambda group: group["title"])
    if repeated:
        title = f"{len(repeated)} times: {repeated[0]['title'].rpartition(' ')[0].lower()}"
        steps.insert(-1, repeated[0] | {"title": title})
    return steps


def _holds_ours(workflow: dict, group: dict) -> bool:
    left, top, width, height = group["bounding"]
    return any(
        node["type"].startswith(OURS) and 0 <= node["pos"][0] - left <= width and 0 <= node["pos"][1] - top <= height
        for node in workflow["nodes"]
    )


def run_tiny_world(workflow: dict) -> tuple[Run, int]:
    with comfy_server() as server:
        prompt = to_api_prompt(workflow, server.object_info())
        given = prompt[node_of(prompt, "QuantWMTinyWorldSeed")]["inputs"]["seed_frames"]
        return run_prompt(server, with_settings(prompt, method="quantwm")), given


def run_comparison(workflow: dict) -> tuple[list[Image.Image], dict]:
    """Frames beside each other and the record of the workflow's Compare Worlds."""
    with comfy_server() as server:
        prompt = to_api_prompt(workflow, server.object_info())
        compare = node_of(prompt, "QuantWMCompare")
        prompt["frames"] = {"class_type": "SaveImage", "inputs": {"images": [compare, 2], "filename_prefix": "frame"}}
        outputs = server.run(prompt)["outputs"]
        frames = [Image.open(io.BytesIO(server.file(each))) for each in outputs["frames"]["images"]]
        return [frame.convert("RGB") for frame in frames], record_in(outputs[compare]["text"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workflows", nargs="*", metavar="WORKFLOW", help="names without .json (all)")
    wanted = parser.parse_args().workflows
    start_host()
    load_pack()
    canvas_module = importlib.import_module("quantwm_pack.nodes.canvas")
    for path in sorted(WORKFLOWS.glob("*.json")):
        if wanted and path.stem not in wanted:
            continue
        workflow = json.loads(path.read_text())
        types = {node["type"] for node in workflow["nodes"]}
        if "QuantWMCompare" in types:
            picture = comparison_picture(canvas_module, *run_comparison(workflow))
        elif "QuantWMTinyWorldSeed" in types:
            picture = tiny_world_picture(canvas_module, *run_tiny_world(workflow))
        else:
            picture = steps_picture(canvas_module, workflow, path.stem)
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=88, optimize=True)
        path.with_suffix(".jpg").write_bytes(data.getvalue())
        print(f"{path.with_suffix('.jpg').relative_to(ROOT)}: {len(data.getvalue()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
