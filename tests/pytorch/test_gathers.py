# SPDX-License-Identifier: Apache-2.0
"""Gathers of quantized tensors have the bits of a cast of all rows, and exchange codes."""

import re

import pytest
import torch
from pytorch import gather_programs as programs
from pytorch.quantized_cases import FORMATS, assert_same_tensor, current, source_of
from pytorch.ranks import FOUR_TOO, ONE_TOO
from thinning import in_turns

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import gather_along_first_dim

BLOCKS = {
    "tiles": (128, 128), "tiles f32": (128, 128), "tiles e5m2": (128, 128), "lines": (1, 128),
    "mx": (1, 32), "mx margin": (1, 32), "mx squares": (32, 32),
    "nv": (1, 16), "nv 4over6": (1, 16), "nv rows": (1, 16), "nv rht": (1, 16),
    "nv rht unsigned": (1, 16), "nv squares": (16, 16),
    "rows": (1, None), "rows power 2": (1, None), "rows e5m2": (1, None),
    "delayed": (1, 1), "current": (1, 1),
}  # fmt: skip
"""Rows that a rank has a multiple of, so that row-wise and column-wise codes join; None: never."""
USAGES = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
SHAPES = [(128, 256), (16, 2, 130), (48, 64), (21, 34), (1, 64)]
SHARED = [name for name in BLOCKS if name.startswith("nv")]
"""Formats whose parts were quantized with the amax of all ranks."""


OPTIONS = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]
"""Quantized before, asynchronous, into a tensor."""


@pytest.mark.parametrize("ranks", ONE_TOO, indirect=True)
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_of_a_cast_of_all_rows(ranks, name):
    """Parts that do not join are read, and their values are cast: again, of quantized ones."""
    cases, wanted = [], []
    for shape, form, options in in_turns(SHAPES, USAGES, OPTIONS):
        usages = dict(zip(("rowwise", "columnwise"), USAGES[form], strict=True))
        quantizer = programs.quantizer_of(name, "cpu", usages)
        tensors = [source_of("cpu", shape) * (rank + 1) for rank in range(ranks.size)]
        rows = torch.Size(shape[:-1]).numel()
        blocks = [n for n, used in zip(BLOCKS[name], USAGES[form], strict=True) if used]
        joins = all(block is not None and rows % block == 0 for block in blocks)
        values = torch.cat(tensors)
        if options[0] and not joins:
            options = (options[0] and name not in SHARED, *options[1:])
        if options[0] and not joins:
            values = torch.cat([quantizer(tensor).dequantize() for tensor in tensors])
        cases.append((tensors, usages, *options))
        wanted.append((joins, usages, quantizer(values)))
    for results in ranks.run(programs.gathers, name, cases):
        for (found, sent), (joins, usages, expected) in zip(results, wanted, strict=True):
            if ranks.size > 1:
                assert (torch.bfloat16 not in sent) == joins
                assert_same_tensor(found, expected)
            elif joins:  # a quantized tensor of one rank is the result, with all forms that it has
                found.update_usage(**{f"{form}_usage": wants for form, wants in usages.items()})
                assert_same_tensor(found, expected)


@pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)
@pytest.mark.parametrize("name", ["current", "lines", "nv"])
def test_groups_of_two(ranks, name):
    """Each has its own amax."""
    if ranks.size == 1:
        pytest.skip("one rank makes no pair")
    tensors = [source_of("cpu", (128, 64)) * 3**rank for rank in range(ranks.size)]
    quantizer = programs.quantizer_of(name, "cpu", {"rowwise": True, "columnwise": True})
    for rank, found in enumerate(ranks.run(programs.gather_in_pairs, name, tensors)):
        first = rank // 2 * 2
        assert_same_tensor(found, quantizer(torch.cat(tensors[first : first + 2])))


REFUSED = {
    "gather DTensor": "TypeError: gather_along_first_dim: inp: DTensor, .* to_local",
    "quantized gather DTensor": "TypeError: gather_along_first_dim: inp: DTensor",
    "scatter DTensor": "TypeError: reduce_scatter_along_first_dim: inp: DTensor",
    "reduce DTensor": "TypeError: allreduce: inp: DTensor",
    "reduce quantized": "TypeError: allreduce: inp: Float8Tensor, .* dequantize",
    "gather quantized": "TypeError: gather_along_first_dim: inp: Float8Tensor",
    "scatter rows": "ValueError: .* rows are no . equal parts",
    "gather output": "ValueError: gather_along_first_dim: output_tensor: shape",
    "scatter output": "ValueError: reduce_scatter_along_first_dim: output: shape",
    "quantized output": "ValueError: gather_along_first_dim: output_tensor: shape",
    "plain output": "TypeError: gather_along_first_dim: output_tensor: Tensor, expected a Float8",
    "no quantizer": "TypeError: gather_along_first_dim: quantizer: ReLU",
    "no dims": r"ValueError: gather_along_first_dim: inp: shape \(\)",
    "coalesced": "NotImplementedError: .*external_coalescing",
}


def test_refused(ranks):
    if ranks.size == 1:
        pytest.skip("a group of one rank exchanges nothing")
    tensors = [torch.randn(2 * ranks.size, 16) for _ in range(ranks.size)]
    for rank, found in enumerate(ranks.run(programs.refused, tensors)):
        wanted = dict(REFUSED)
        if rank > 0:
            wanted["not in group"] = "ValueError: allreduce: this process is not in the group"
            wanted["not in group, quantized"] = "ValueError: gather_along_first_dim: this process"
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert re.match(text, found[name]), found[name]


@pytest.mark.parametrize("name", [*FORMATS, "current"])
def test_one_process(device, name):
    quantizer = (FORMATS | {"current": current})[name]()
    x = source_of(device, (32, 64))
    made, handle = gather_along_first_dim(x, None, True, quantizer)
    assert handle is None
    assert_same_tensor(made, quantizer(x))
    assert gather_along_first_dim(made, None, quantizer=quantizer)[0] is made
    out = quantizer.make_empty((32, 64), dtype=x.dtype, device=device)
    assert gather_along_first_dim(x, None, quantizer=quantizer, output_tensor=out)[0] is out
    assert_same_tensor(out, made)


def test_a_storage_stays_one(device):
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    quantizer.internal = True
    made, _ = gather_along_first_dim(source_of(device, (32, 64)), None, quantizer=quantizer)
    assert not isinstance(made, torch.Tensor)
