"""A CUDA stream for work that nobody waits for at once: packing a block while the model goes on with its next layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs work beside the model's stream; without a CUDA device, in its place."""

    def __init__(self, device: torch.device | None = None) -> None:
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None

    @contextmanager
    def beside(self, inputs: Iterable[torch.Tensor]) -> Iterator[None]:
        """What is issued within starts when all that was issued before is done, and does not delay what follows.

        inputs: tensors of the model's stream that the work reads; their memory is not reused before it has.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            for tensor in inputs:
                tensor.record_stream(self._stream)

    def hand_over(self, outputs: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
        """The event that the model's stream must wait for before it reads `outputs`, or None where nothing is pending.

        Called after `beside`; from then on the outputs may be freed like tensors of the model's stream.
        """
        if self._stream is None:
            return None
        main = torch.cuda.current_stream(self._stream.device)
        for tensor in outputs:
            if tensor.is_cuda:
                tensor.record_stream(main)
        return self._stream.record_event()
