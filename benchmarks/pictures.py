"""Pictures of two rollouts beside each other: a video, and a sheet of stills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SCALE, GAP, STRIP = 3, 6, 34
BACKGROUND, TEXT, FAINT = "#14151f", "#e8ecff", "#8f96b8"

Frames = Sequence[Image.Image]


def psnr(first: Frames, second: Frames) -> float:
    """Peak signal-to-noise ratio in dB over all pixels of two equally long rollouts, at most 100."""
    difference = np.stack([np.asarray(a, np.float64) - np.asarray(b) for a, b in zip(first, second, strict=True)])
    error = (difference**2).mean()
    return 100.0 if error == 0 else min(100.0, float(10 * np.log10(255**2 / error)))


def side_by_side(left: Image.Image, right: Image.Image, titles: Sequence[str], footer: str) -> Image.Image:
    """Two frames, enlarged, with a title above each and one line below; width and height are even."""
    width, height = left.width * SCALE, left.height * SCALE
    canvas = Image.new("RGB", (2 * width + GAP, height + 2 * STRIP), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(17)
    for column, (frame, title) in enumerate(zip((left, right), titles, strict=True)):
        x = column * (width + GAP)
        canvas.paste(frame.resize((width, height), Image.Resampling.BICUBIC), (x, STRIP))
        draw.text((x + 10, STRIP // 2), title, font=font, fill=TEXT, anchor="lm")
    draw.text((10, height + STRIP * 3 // 2), footer, font=font, fill=FAINT, anchor="lm")
    return canvas


def write_video(path: Path, pictures: Frames, rate: int) -> None:
    """Write pictures of one even size as an H.264 file with `rate` frames a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=rate, options={"crf": "18"})
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())


def contact_sheet(rows: Sequence[Frames], titles: Sequence[str], captions: Sequence[str]) -> Image.Image:
    """One row of frames for each rollout, a title above each row, a caption under each column."""
    width, height = rows[0][0].width, rows[0][0].height
    columns = len(rows[0])
    canvas = Image.new("RGB", (columns * (width + GAP) + GAP, len(rows) * (height + STRIP) + STRIP), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(15)
    for index, (row, title) in enumerate(zip(rows, titles, strict=True)):
        y = index * (height + STRIP)
        draw.text((GAP, y + STRIP // 2), title, font=font, fill=TEXT, anchor="lm")
        for column, frame in enumerate(row):
            canvas.paste(frame, (GAP + column * (width + GAP), y + STRIP))
    for column, caption in enumerate(captions):
        x = GAP + column * (width + GAP)
        draw.text((x, canvas.height - STRIP // 2), caption, font=font, fill=FAINT, anchor="lm")
    return canvas
