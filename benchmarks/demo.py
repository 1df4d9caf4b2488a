"""Roll out the tiny world in a real ComfyUI with its cache as it is and in 2 bits, and show what that saves.

    python -m benchmarks.demo [--out FOLDER] [--workflow FILE]

The workflow goes through ComfyUI's HTTP API, so this is what a user's own run does.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from quantwm_core.accounting import format_bytes

from .host import ROOT
from .pictures import contact_sheet, psnr, side_by_side, write_video
from .server import ComfyServer, Event, comfy_server
from .workflow_api import to_api_prompt

RUNS = {
    "off": {"method": "off"},
    "quantwm": {"method": "quantwm", "key_bits": "2", "value_bits": "2"},
}
FRAMES_NODE = "demo_frames"
VIDEO_RATE = 8


@dataclass
class Run:
    """What one prompt gave: its frames (seed frames first), chart, stats record and seconds of sampling."""

    frames: list[Image.Image]
    chart: bytes
    record: dict
    seconds: float


class Progress:
    """Prints how the timed node gets on (the text it shows, else its steps), and takes its time."""

    def __init__(self, timed_node: str):
        self.timed_node = timed_node
        self.seconds = 0.0
        self._started: float | None = None
        self._has_text = False
        self._last = ""

    def __call__(self, event: Event) -> None:
        data = event["data"]
        if event["type"] == "executing":
            now = time.monotonic()
            if self._started is not None:
                self.seconds += now - self._started
            self._started = now if data["node"] == self.timed_node else None
        elif self._started is None:
            return
        elif event["type"] == "progress_text":
            self._has_text = True
            self._show(", ".join(line.strip() for line in data["text"].splitlines()))
        elif event["type"] == "progress_state" and not self._has_text:
            state = data["nodes"].get(self.timed_node)
            if state and state["value"]:
                self._show(f"step {state['value']:.0f} of {state['max']:.0f}")

    def _show(self, line: str) -> None:
        if line != self._last:
            print(f"  {line}", flush=True)
        self._last = line


def node_of(prompt: dict, class_type: str) -> str:
    """Id of the only node of a type in a prompt; LookupError unless there is exactly one."""
    found = [key for key, node in prompt.items() if node["class_type"] == class_type]
    if len(found) != 1:
        raise LookupError(f"the workflow must have one {class_type}, it has {len(found)}")
    return found[0]


def with_settings(prompt: dict, **settings: str) -> dict:
    """A copy of the prompt with other inputs of its QuantWMKVCache node, and its frames saved as PNG."""
    prompt = copy.deepcopy(prompt)
    prompt[node_of(prompt, "QuantWMKVCache")]["inputs"].update(settings)
    source = [node_of(prompt, "VAEDecode"), 0]
    prompt[FRAMES_NODE] = {
        "class_type": "SaveImage",
        "inputs": {"images": source, "filename_prefix": "demo/frame"},
    }
    return prompt


def record_in(report: str) -> dict:
    """The stats record, which the report of the stats node carries as JSON."""
    decoder = json.JSONDecoder()
    for start in (index for index, letter in enumerate(report) if letter == "{"):
        try:
            return decoder.raw_decode(report[start:])[0]
        except json.JSONDecodeError:
            continue
    raise ValueError(f"the report of the stats node has no JSON record:\n{report}")


def run_prompt(server: ComfyServer, prompt: dict) -> Run:
    """Run one prompt on the server, printing its progress."""
    progress = Progress(node_of(prompt, "SamplerCustomAdvanced"))
    outputs = server.wait(server.queue(prompt), progress)["outputs"]
    stats = outputs[node_of(prompt, "QuantWMCacheStats")]
    saved = [server.file(reference) for reference in outputs[FRAMES_NODE]["images"]]
    return Run(
        frames=[Image.open(io.BytesIO(data)).convert("RGB") for data in saved],
        chart=server.file(stats["images"][0]),
        record=record_in("\n".join(stats["text"])),
        seconds=round(progress.seconds, 2),
    )


def warm_up(server: ComfyServer, prompt: dict, given: int) -> None:
    """Load models and start torch's threads with a run of one block, so that the timed runs are alike."""
    prompt = with_settings(prompt, method="off")
    prompt[node_of(prompt, "QuantWMTinyWorldSeed")]["inputs"]["length"] = given + 3
    server.run(prompt)


def resident(record: dict) -> int:
    """Bytes of all that the cache holds at the end of a run."""
    return record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]


def caption(record: dict) -> str:
    """Title of a rollout: what its cache took at the end."""
    if record["method"] == "off":
        return f"full precision: {format_bytes(record['bytes_bf16'])} of cache in BF16"
    bits = f"{record['key_bits']}-bit keys, {record['value_bits']}-bit values"
    return f"QuantWM, {bits}: {format_bytes(resident(record))} of cache"


def write_pictures(out: Path, off: Run, packed: Run, given: int) -> None:
    """Write demo.mp4, frames.png and memory.png."""
    titles = [caption(off.record), caption(packed.record)]
    total = len(off.frames)
    footers = [f"frame {index + 1} of {total}: {'given' if index < given else 'generated'}" for index in range(total)]
    pictures = [
        side_by_side(left, right, titles, footer)
        for left, right, footer in zip(off.frames, packed.frames, footers, strict=True)
    ]
    write_video(out / "demo.mp4", pictures, VIDEO_RATE)
    shown = [given + (total - given - 1) * step // 3 for step in range(4)]
    rows = [[run.frames[index] for index in shown] for run in (off, packed)]
    contact_sheet(rows, titles, [footers[index] for index in shown]).save(out / "frames.png", optimize=True)
    (out / "memory.png").write_bytes(packed.chart)


def summary_lines(off: Run, packed: Run, given: int, decibels: float, out: Path) -> list[str]:
    """What a person wants to know, in five lines."""
    record, total = packed.record, len(packed.frames)
    return [
        f"world    {total} frames: {given} given, {total - given} generated",
        f"memory   {record['tokens']} tokens in {format_bytes(resident(record))}, not "
        f"{format_bytes(record['bytes_bf16'])} in BF16: {record['ratio_resident']:.1f}x smaller",
        f"picture  {decibels:.1f} dB PSNR between the two, over the generated frames",
        f"time     {off.seconds:.1f} s of sampling at full precision, {packed.seconds:.1f} s in 2 bits",
        f"files    {out}/demo.mp4, frames.png, memory.png, summary.json",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (out)")
    parser.add_argument("--workflow", type=Path, help="workflow file (the tiny-world template)")
    arguments = parser.parse_args()
    workflow = arguments.workflow or ROOT / "workflows" / "tiny-world.json"
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    print(f"Starting ComfyUI (log: {out}/demo-server.log)", flush=True)
    with comfy_server(log_path=out / "demo-server.log") as server:
        prompt = to_api_prompt(json.loads(workflow.read_text()), server.object_info())
        given = prompt[node_of(prompt, "QuantWMTinyWorldSeed")]["inputs"]["seed_frames"]
        print("Warming up", flush=True)
        warm_up(server, prompt, given)
        runs = {}
        for name, settings in RUNS.items():
            print(f"Running {workflow.stem} with method {name}", flush=True)
            runs[name] = run_prompt(server, with_settings(prompt, **settings))

    off, packed = runs["off"], runs["quantwm"]
    decibels = psnr(off.frames[given:], packed.frames[given:])
    write_pictures(out, off, packed, given)
    summary = {name: {**run.record, "seconds": run.seconds} for name, run in runs.items()}
    summary["psnr"] = round(decibels, 2)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + "\n".join(summary_lines(off, packed, given, decibels, out)))


if __name__ == "__main__":
    main()
