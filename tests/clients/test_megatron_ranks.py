# SPDX-License-Identifier: Apache-2.0
"""megatron-core, released and unpatched, over two ranks: tensor and sequence parallelism."""

import importlib.util

import pytest
from clients import megatron_ranks as programs
from clients.megatron_gpt import DELAYED, LLAMA, STEPS
from pytorch.ranks import Ranks
from tols import BF16, E4M3, tol

GEMMS = 8 * 3 * STEPS  # of two layers of four linear ones; forward and two gradients
OPTIONS = {
    "bf16": {}, "delayed": DELAYED, "llama": LLAMA, "llama_delayed": {**LLAMA, **DELAYED},
}  # fmt: skip
GROUPS = [
    pytest.param((version, device), id=f"{version}-{backend}-2", marks=marks)
    for version in ("0.16.1", "0.19.2")
    for device, backend, marks in (("cpu", "gloo", ()), ("cuda", "nccl", pytest.mark.multigpu))
]


@pytest.fixture(scope="module", params=GROUPS)
def group(request):
    """Processes that import one version: a function that finds its folders, and they."""
    version, device = request.param
    ranks = Ranks(device, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # what megatron-core asks for
        yield version, ranks
        ranks.close()


def check(group, fetched, seed, kind, name):
    """Losses are those of one rank, and so are the gradients of the first step."""
    version, ranks = group
    folders = [fetched(f"megatron-core-{version}")]
    if version == "0.19.2" and importlib.util.find_spec("triton") is None:
        folders.append(fetched("triton-3.7.0"))  # it imports triton, and does not say so
    results = ranks.run(programs.trained, [*map(str, folders)], seed, kind, OPTIONS[name])
    for ((exact, *counted), (losses, *of_ranks)), worst in results:
        assert len(losses) == len(exact) == STEPS
        assert exact[-1] < exact[STEPS // 2] < exact[0]
        of_step = 2 if kind == "megatron" else 1  # microbatches
        expected = [GEMMS * of_step, 0] if "delayed" in name else [0, GEMMS * of_step]
        assert counted == of_ranks == expected
        for one, other in zip(losses, exact, strict=True):  # means of what bf16 has rounded
            assert ((one - other) / other) ** 2 <= tol("round", BF16), (losses, exact)
        if worst is not None:
            bound = tol("layer", BF16, 64) + ("delayed" in name) * tol("quantized_layer", E4M3)
            assert worst[0] <= bound, worst


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["model", "decoder"])
def test_losses_are_those_of_one_rank(group, fetched, seed, kind, name):
    check(group, fetched, seed, kind, name)


@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_ddp_and_optimizer_of_megatron(group, fetched, seed, name):
    """Which sums the gradients of norms and biases that see a rank's tokens."""
    if group[1].device == "cpu":
        pytest.skip("megatron-core makes its buffers on a GPU")
    check(group, fetched, seed, "megatron", name)
