"""Adds up time spent in a phase without making the device wait for it."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Context manager; re-usable, not re-entrant. On CUDA it records events and reads them when asked.

    A graph that torch.compile makes has no clock: what it takes up is not timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._start = 0.0

    def __enter__(self) -> Stopwatch:
        if torch.compiler.is_compiling():
            return self
        if self._cuda:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._start = time.perf_counter()
        return self

    def __exit__(self, *exception) -> None:
        if torch.compiler.is_compiling():
            return
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._start

    def seconds(self) -> float:
        """Total so far; waits for the device if it has to."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(stop) for start, stop in self._events) / 1000
            self._events.clear()
        return self._seconds
