"""Work beside the caller's stream: packing waits for nobody, and nobody reads what it makes for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class SideStream:
    """A CUDA stream for work whose results are needed later; elsewhere the work is done in place.

    Memory that the work allocates belongs to the side stream, and every piece of work first waits for the caller's
    stream, so what was freed before it began has been read by then.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._callers: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def work(self, inputs: Iterable[torch.Tensor]) -> Iterator[None]:
        """What is issued within runs beside the caller's stream, after all that was issued before.

        Args:
            inputs: tensors of the caller's that it reads; their memory is not given away before it has.
        """
        if self._stream is None:
            yield
            return
        self._callers = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(self._callers)
        for tensor in inputs:
            tensor.record_stream(self._stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done = self._stream.record_event()

    def on_callers(self, make: Callable[[], Result]) -> Result:
        """Within `work`: something that has to run on the caller's stream, such as a layer of the host's model."""
        if self._stream is None:
            return make()
        with torch.cuda.stream(self._callers):
            made = make()
        self._stream.wait_stream(self._callers)
        if isinstance(made, torch.Tensor):
            made.record_stream(self._stream)
        return made

    def join(self) -> None:
        """What the caller's stream does from here on sees the results."""
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
            self._done = None
