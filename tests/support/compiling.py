"""Compile kernels for GPUs that are not here: what their wrappers would launch, for any target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass
class Launch:
    """A kernel and the arguments that a wrapper gave it; `warmup` if only to have it compiled."""

    kernel: JITFunction
    arguments: dict
    options: dict
    warmup: bool = False

    def specialized(self) -> tuple[dict, dict, dict]:
        """What Triton compiles for: constants, types, and which arguments are divisible by 16."""
        constants, signature, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                constants[parameter.name], signature[parameter.name] = value, "constexpr"
            elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
                constants[parameter.name], signature[parameter.name] = value, "constexpr"
            else:
                signature[parameter.name] = _type_of(value)
                whole = isinstance(value, int) and not parameter.do_not_specialize
                if isinstance(value, torch.Tensor) or (whole and value % 16 == 0):
                    attributes[(index,)] = [["tt.divisibility", 16]]
        return constants, signature, attributes

    def compile(self, capability: int):
        """The compiled kernel (its `asm` holds the cubin), as the launcher would have built it."""
        constants, signature, attributes = self.specialized()
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


def _type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within, kernels are not launched but listed, with what they would have been launched with."""
    launches: list[Launch] = []
    original = JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        names = [parameter.name for parameter in self.params]
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        launches.append(Launch(self, dict(zip(names, args)) | kwargs, options, warmup))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def distinct(launches: list[Launch]) -> list[Launch]:
    """The first launch of each kernel that Triton would compile."""
    by_key = {}
    for launch in launches:
        by_key.setdefault((launch.kernel.__name__, str(launch.specialized()), str(launch.options)), launch)
    return list(by_key.values())
