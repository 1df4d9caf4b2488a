"""Adds up time spent in a phase without making the device wait for it."""

from __future__ import annotations

import time
from collections import deque

import torch

# Pairs of events in flight: more than a caller that runs ahead of the device issues. Making new ones takes it longer
# than recording them.
MOST_PAIRS = 256


class Stopwatch:
    """Context manager; re-usable, not re-entrant. On CUDA it records events and reads them when asked or reused.

    A graph that torch.compile makes has no clock: what it takes up is not timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._start = 0.0

    def __enter__(self) -> Stopwatch:
        if torch.compiler.is_compiling():
            return self
        if self._cuda:
            pair = self._next_pair()
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
        while self._events:
            self._read(self._events.popleft())
        return self._seconds

    def finished_seconds(self) -> float:
        """Total of what the device has finished by now. Never waits, so that it can be asked during a run."""
        while self._events and self._events[0][1].query():
            self._read(self._events.popleft())
        return self._seconds

    def _next_pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if len(self._events) < MOST_PAIRS:
            return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        oldest = self._events.popleft()
        self._read(oldest)
        return oldest

    def _read(self, pair: tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        pair[1].synchronize()
        self._seconds += pair[0].elapsed_time(pair[1]) / 1000
