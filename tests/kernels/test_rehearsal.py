"""What is compiled before a first span is packed, looked at without a GPU: kernels are listed, not compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.host import ROOT

# Triton is imported once a process, interpreted or not; listing needs the compiler's kernels.
LISTED = """
import sys
import torch
from benchmarks.bare_pack import bare_module
from support.compiling import distinct, recorded

new_empty = torch.Tensor.new_empty


def junk(self, *args, **kwargs):
    tensor = new_empty(self, *args, **kwargs)
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)


torch.Tensor.new_empty = junk
decode, encode, launching = (bare_module(f"kernels.{name}") for name in ("decode", "encode", "launching"))
bare_module("kernels.encode_codebook").has_wgmma = lambda device: True
bare_module("kernels.encode_nearest").large_blocks = lambda device: True
methods, settings = bare_module("quantwm_core.methods"), bare_module("quantwm_core.settings")
stats, rotations = bare_module("quantwm_core.query_stats"), bare_module("quantwm_core.rotation")


def listed(work, rehearsed=False):
    with recorded() as launches:
        work()
    assert launches and all(one.warmup is rehearsed for one in launches)
    return {(one.kernel.__name__, str(one.specialized()), str(one.options)) for one in distinct(launches)}


def missing(batch, tokens, width, dtype=torch.float16, rotated=False, asked=True, **options):
    q, k, v = torch.randn(3, batch, tokens, 3, width).to(dtype).unbind(0)
    rotation = rotations.Rotation(*torch.ones(2, tokens, width // 2)) if rotated else None
    own = stats.QueryStats(stats.second_moment(q) if asked else None, rotation=rotation)
    method = encode.fused(methods.QuantWM(settings.CacheSettings(**options)))
    metric = torch.eye(width).expand(batch * 3, width, width)
    spans = []

    def work():
        state = methods.LayerState(lambda: metric)
        spans.extend(method.encode(k, v, own, state) for _ in range(3))
        keys, values = k.new_empty(2, batch, tokens, 3, width)
        decode.decode_layer(method, spans[-1:], keys, values)

    rehearsed = listed(lambda: encode._rehearse(method, k, v, own), rehearsed=True)
    return listed(work) - rehearsed


try:
    with launching.rehearsal():
        raise InterruptedError
except InterruptedError:
    pass  # and what comes after it is launched again, as all work below must be


for case in (
    dict(batch=1, tokens=300, width=128),
    dict(batch=6, tokens=301, width=128, dtype=torch.bfloat16),
    dict(batch=2, tokens=1560, width=48, key_bits=4, value_bits=8),
    dict(batch=1, tokens=90, width=64, key_bits=16),
    dict(batch=1, tokens=90, width=64, value_bits=16),
    dict(batch=3, tokens=200, width=256),
    dict(batch=1, tokens=200, width=80, rank=5, candidates=4, centroids=20),
    dict(batch=2, tokens=200, width=128, rank=40, rotated=True),
    dict(batch=1, tokens=200, width=96, group_size=128, asked=False),
):
    left = missing(**case)
    assert not left, (case, left)
    print("complete")
"""


def test_what_a_span_takes_is_rehearsed_and_nothing_computed_is_looked_at():
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA compiler")
    pytest.importorskip("triton.runtime._async_compile", reason="this Triton compiles one kernel at a time")
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LISTED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("complete") == 9
