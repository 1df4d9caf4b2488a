"""Kernels compile for the GPUs people have, on a machine that has none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.host import ROOT

CAPABILITIES = [80, 86, 89, 90, 120]
# Triton is imported once a process, interpreted or not; these need the compiler.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.bare_pack import bare_module

decode, attention, tables = (bare_module(f"kernels.{name}") for name in ("decode", "attention", "tables"))
rivals = bare_module("kernels.decode_rivals")
POINTERS = {"rows": "*i64", "tiles": "*i32", "scale": "fp32", "costs": "*fp32", "signs": "*bf16", "lengths": "*fp32"}
HALVES = ("live_k", "live_v", "keys", "values", "queries", "out")

def build(kernel, constants, options, capability, half="*bf16"):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = POINTERS | dict.fromkeys(HALVES, half) | dict.fromkeys(constants, "constexpr")
    signature = {n: types.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    print(kernel.__name__, capability, compiled.metadata.shared, "bytes of shared memory")
    return compiled.metadata.shared

def split(shape):
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in shape}
    return shape, options

capability = int(sys.argv[1])
FORMS = (
    (("quantwm", 2, 2, 64, 16, False), 128),
    (("quantwm", 2, 2, 64, 16, False, True), 128),
    (("quantwm-paper", 2, 2, 64, 8, True, True), 80),
)
for family, form in enumerate((("kivi", 2, 2, 32), ("qvg-pro", 2, 2, 16), ("quarot", 2, 2, 64)), 1):
    form = tables.Format(*form, 0, False, family == 2)
    constants = decode.format_constants(tuple(form.numbers()[:-1]), 128, True) | {"FAMILY": family}
    shape, options = split(rivals.launch_shape(128))
    assert build(rivals.rival_kernel, constants | shape, options, capability) <= 99 * 1024

for form, width in FORMS:
    constants = decode.format_constants(tuple(tables.Format(*form).numbers()[:-1]), width, True)
    for pairs, half in ((False, "*bf16"), (True, "*bf16"), (True, "*fp16"))[: 3 if form[0] == "quantwm" else 1]:
        shape, options = split(decode.launch_shape(constants["W"], pairs))
        build(decode.decode_kernel, constants | shape | {"PAIRS": pairs}, options, capability, half)
    if form[0] == "quantwm":
        shape, options = split(attention.launch_shape(constants["W"], 4680))
        for correction in (0, 1, 2) if len(form) == 6 else (1,):
            shared = build(attention.attention_kernel, constants | shape | {"JENSEN": correction}, options, capability)
            assert shared <= 99 * 1024, "more shared memory than an sm_86, sm_89 or sm_120 block may have"
"""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_read_kernels_compile(capability):
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA compiler")
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "TRITON_INTERPRET": "0", "HOME": str(ROOT / "out")}
    run = subprocess.run([sys.executable, "-c", COMPILE, str(capability)], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
