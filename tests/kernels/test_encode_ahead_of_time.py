"""The encoder's kernels compile for the GPUs people have, as their wrappers launch them, on a machine that has none."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.host import ROOT

# And the shared memory that a block may have there, in KiB.
CAPABILITIES = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
# Triton is imported once a process, interpreted or not; this needs the compiler.
COMPILE = """
import sys
import torch
from benchmarks.bare_pack import bare_module
from support.compiling import distinct, recorded

capability, limit = int(sys.argv[1]), int(sys.argv[2])
encode, statistics = bare_module("kernels.encode"), bare_module("kernels.statistics")
bare_module("kernels.encode_codebook").has_wgmma = lambda device: capability == 90
bare_module("kernels.encode_nearest").large_blocks = lambda device: limit > 128
methods, settings = bare_module("quantwm_core.methods"), bare_module("quantwm_core.settings")
stats, rotation = bare_module("quantwm_core.query_stats"), bare_module("quantwm_core.rotation")
k = torch.empty(1, 4680, 12, 128, dtype=torch.bfloat16)
with recorded() as launches:
    statistics.second_moment(k)
    state = methods.LayerState(lambda: torch.zeros(12, 128, 128))
    method = methods.QuantWM(settings.CacheSettings())
    for _ in range(2):
        encode.fused(method).encode(k, k, stats.QueryStats(torch.zeros(1, 12, 128, 128)), state)
    turned = stats.QueryStats(torch.zeros(1, 12, 128, 128), rotation=rotation.Rotation(*torch.zeros(2, 4680, 64)))
    encode.fused(method).encode(k, k, turned, methods.LayerState())
for launch in distinct(launches):
    compiled = launch.compile(capability)
    shared = compiled.metadata.shared
    print(launch.kernel.__name__, len(compiled.asm["cubin"]), shared, flush=True)
    assert shared <= limit * 1024, "more shared memory than a block may have there"
"""


@pytest.fixture(scope="module")
def builds():
    """A process for each capability, all at once: compiling takes half a minute each."""
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA compiler")
    path = f"{ROOT}:{ROOT / 'tests'}"
    env = {"PYTHONPATH": path, "PATH": "", "TRITON_INTERPRET": "0", "HOME": str(ROOT / "out"), "OMP_NUM_THREADS": "1"}

    def start(capability: int) -> subprocess.Popen:
        command = [sys.executable, "-c", COMPILE, str(capability), str(CAPABILITIES[capability])]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    running = {capability: start(capability) for capability in CAPABILITIES}
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_encode_kernels_compile(builds, capability):
    output, _ = builds[capability].communicate(timeout=600)
    assert builds[capability].returncode == 0, output[-2000:]
    built = {line.split()[0] for line in output.splitlines()}
    assert {"_nearest_kernel", "_steps_kernel", "_residual_kernel", "_basis_kernel"} <= built


COUNT = """
import torch
from benchmarks.bare_pack import bare_module
from support.compiling import distinct, recorded

encode, statistics = bare_module("kernels.encode"), bare_module("kernels.statistics")
methods, settings = bare_module("quantwm_core.methods"), bare_module("quantwm_core.settings")
stats = bare_module("quantwm_core.query_stats")
method = methods.QuantWM(settings.CacheSettings(centroids=64))
with recorded() as launches:
    # The last is a multiple of 16; for that, what loops over tiles of tokens is compiled apart.
    for tokens in (4680, 4681, 6243, 6240):
        k = torch.empty(6, tokens, 12, 128, dtype=torch.bfloat16)
        statistics.second_moment(k[:1])
        state = methods.LayerState(lambda: torch.zeros(12, 128, 128))
        for _ in range(2):
            encode.fused(method).encode(k, k, stats.QueryStats(torch.zeros(6, 12, 128, 128)), state)
        print(*sorted(launch.kernel.__name__ for launch in distinct(launches)))
"""


def test_other_lengths_compile_nothing_anew():
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    output = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, check=True).stdout
    first, *others, last = map(str.split, output.splitlines())
    assert len(first) > 10 and others == [first, first]
    assert set(Counter(last) - Counter(first)) == {"_nearest_kernel", "_steps_kernel"}
