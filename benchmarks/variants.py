"""What a row of a benchmark of whole generations runs: a method with its settings, in some circumstances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch.nn.attention import SDPBackend

from .bare_pack import bare_module


@dataclass(frozen=True)
class Variant:
    """A row: a method with its settings, in circumstances that last for its runs."""

    method: str
    name: str = "default"
    settings: dict = field(default_factory=dict)
    around: Callable[[], AbstractContextManager] = nullcontext
    once: bool = False


def variants(gpu: bool) -> Iterator[Variant]:
    """Native first: all ratios are to it."""
    yield Variant("native")
    if gpu:
        yield Variant("native", "cudnn", around=host_on_cudnn)
    yield Variant("off")
    yield Variant("quantwm")
    if gpu:
        yield Variant("quantwm", "host attention", around=host_attention)
    yield Variant("quantwm-paper", once=True)
    yield Variant("rtn", once=True)
    if gpu:
        yield Variant("quantwm", "torch", {"backend": "torch"}, once=True)


@contextmanager
def host_on_cudnn() -> Iterator[None]:
    """The host's attention limited to cuDNN's."""
    import comfy.ops

    order = comfy.ops.SDPA_BACKEND_PRIORITY
    before = list(order)
    order.sort(key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION)
    try:
        yield
    finally:
        order[:] = before


def host_attention() -> AbstractContextManager:
    """Packed caches are read, and then the host's attention is used."""
    return bare_module("quantwm_core.backends").only_eager("attend_packed")
