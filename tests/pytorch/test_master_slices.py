# SPDX-License-Identifier: Apache-2.0
"""Slices of masters of sharded optimizers: after the gather the bits of a cast of the whole."""

import pytest
import torch
from pytorch import master_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.master_programs import OWN, QUANTIZERS, SQUARES, Case, Threads
from pytorch.own_quantizers import Halves, HalvesQuantizer, halves_of
from pytorch.quantized_cases import E4M3, WEIGHT_RECIPES, assert_same_tensor, source_of
from pytorch.ranks import Ranks

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import IdentityTensor, utils

ROUNDS = 12


@pytest.fixture(scope="module")
def three():
    group = Ranks("cpu", 3)
    yield group
    group.close()


def drawn():
    return int(torch.randint(2**31, ()))


def simulated(monkeypatch, cases, size):
    threads = Threads(size)
    monkeypatch.setattr(utils, "_reduce", threads.reduce)
    found = threads.run(lambda *where: programs.update(cases, *where))
    return threads, found


def assert_whole(cases, weights, text=""):
    for case, weight in zip(cases, weights, strict=True):
        found, expected = programs.tensors_of(weight, case.expected())
        about = f"{text} {case.quantizer} {case.shape} {case.dtype} {case.bounds}"
        assert_same_bits(found, expected, about)


# ---- the bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*QUANTIZERS, *OWN])
def test_slices_have_the_bits_of_the_whole(device, name, monkeypatch):
    for number in range(ROUNDS):
        size, seed = number % 4 + 1, drawn()
        case = Case(name, seed, size, device)
        _, found = simulated(monkeypatch, [case], size)
        for rank, weights in enumerate(found):
            assert_whole([case], weights, f"seed {seed} rank {rank}")


def test_processes(ranks):
    _check_processes(ranks)


def test_three_processes(three):
    _check_processes(three)


def _check_processes(group):
    names = [*QUANTIZERS, *OWN]
    for _ in range(4):
        for rank, pairs in enumerate(group.run(programs.masters, names, drawn())):
            for name, (found, expected) in zip(names, pairs, strict=True):
                assert_same_bits(found, expected, f"{name} rank {rank}")


def test_stochastic_rounding(ranks):
    for pair in ranks.run(programs.stochastic, drawn()):
        assert_same_bits(*pair)


@pytest.mark.parametrize("name", ["delayed", "current", *WEIGHT_RECIPES])
def test_sharded_training_is_unsharded_training(ranks, name):
    seed = drawn()
    whole, sharded = (ranks.run(programs.training, name, way, seed) for way in (False, True))
    assert_same_bits(sharded, whole)
    assert len({loss.item() for loss in whole[0]}) == len(whole[0])


# ---- what it takes -------------------------------------------------------------------------------


def test_one_collective_for_all_amaxes(device, monkeypatch):
    cases = [Case(name, drawn(), 3, device) for name in SQUARES]
    threads, found = simulated(monkeypatch, cases, 3)
    assert threads.collectives == 1
    for weights in found:
        assert_whole(cases, weights)


def test_one_more_for_each_parameter_with_columns_of_their_own(device, monkeypatch):
    cases = [Case("mx", drawn(), 2, device) for _ in range(4)]
    threads, found = simulated(monkeypatch, cases, 2)
    written = [case.quantizer.columnwise_usage and not case.pairs for case in cases]
    assert threads.collectives == 1 + sum(written)
    for weights in found:
        assert_whole(cases, weights)


@pytest.mark.parametrize("name", ["mx", "mx squares"])
@pytest.mark.parametrize("empty", [False, True])
def test_pairs_of_shards(device, name, empty, monkeypatch):
    """Nothing but amaxes is exchanged, also where a rank has no slice and can not say so."""
    cases = []
    while len(cases) < 4:
        case = Case(name, drawn(), 3, device)
        if case.pairs and (None in case.bounds) == empty:
            case.drop = len(cases) % 2 == 0
            cases.append(case)
    for case in cases:
        threads, found = simulated(monkeypatch, [case], 3)
        assert threads.collectives == 1
        for weights in found:
            assert_whole([case], weights)


@pytest.mark.parametrize("name", ["mx", "mx squares"])
@pytest.mark.parametrize("form", [0, 1])
def test_one_of_a_pair(device, name, form):
    """The other form is written to the parameter."""
    quantizer, source = QUANTIZERS[name](), source_of(device, (40, 96), torch.float32)
    weight = torch.nn.Parameter(quantizer(torch.zeros_like(source)))
    shard = torch.zeros(source.numel(), dtype=torch.uint8, device=device)
    pair = (shard, None) if form == 0 else (None, shard)
    utils.quantize_master_weights([weight], [source.view(-1)], [0], None, [pair], True)
    expected = quantizer(source)
    codes = (expected._rowwise_data, expected._columnwise_data)
    assert_same_bits(shard, codes[form].reshape(-1))
    (weight._rowwise_data, weight._columnwise_data)[form].copy_(codes[form])
    utils.post_all_gather_processing(weight)
    assert_same_tensor(weight, expected)


@pytest.mark.parametrize("name", SQUARES)
def test_other_row_wise_data_are_not_written(device, name):
    shape = (48, 64)
    weight = torch.nn.Parameter(SQUARES[name]()(source_of(device, shape)))
    before = programs.row_data(weight).clone().view(-1)
    values = 3 * torch.randn(64, device=device)
    utils.quantize_master_weights([weight], [values], [640], None)
    after = programs.row_data(weight).view(-1)
    scale = weight.numel() // after.numel()
    mine = slice(640 // scale, 704 // scale)
    assert (before[mine] != after[mine]).any()
    before[mine] = after[mine]
    assert_same_bits(after, before)
    utils.quantize_master_weights([weight], [values[:0]], [640], None)
    utils.quantize_master_weights([weight], [None], [None], None)
    assert_same_bits(programs.row_data(weight).view(-1), before)


@pytest.mark.parametrize("name", [*QUANTIZERS, *OWN])
def test_one_process_has_it_all(device, name):
    """Without torch.distributed."""
    quantizer = {**QUANTIZERS, **OWN}[name]()
    source = source_of(device, (33, 50), torch.float32)
    weight = torch.nn.Parameter(quantizer(torch.randn_like(source).to(torch.bfloat16)))
    version = weight._version
    utils.quantize_master_weights([weight], [source.view(-1)], [0], None)
    utils.post_all_gather_processing(weight)
    assert weight._version > version
    expected = quantizer(source.to(torch.bfloat16))
    assert_same_bits(*programs.tensors_of(weight, expected))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_a_parameter_without_elements(device, name, shape):
    source = torch.empty(shape, device=device)
    weight = torch.nn.Parameter(QUANTIZERS[name]()(source))
    utils.quantize_master_weights([weight], [source.view(-1)], [0], None)
    utils.post_all_gather_processing(weight)
    assert weight.dequantize().shape == shape


# ---- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiles", "mx squares", "nv squares", "nv squares 4over6"])
@pytest.mark.parametrize("shape", [(32, 48), (3, 7, 130), (129, 37), (300,), (260, 400)])
def test_squares_are_turned(device, name, shape):
    source = source_of(device, shape)
    tensor = QUANTIZERS[name](columnwise=False)(source)
    assert not tensor.get_usages()["columnwise"]
    tensor.update_usage(columnwise_usage=True)
    expected = QUANTIZERS[name]()(source)
    assert_same_tensor(tensor, expected)
    tensor.copy_(2 * source)
    assert_same_tensor(tensor, QUANTIZERS[name]()(2 * source))


@pytest.mark.parametrize("manual", [False, True])
def test_forms_that_are_made_again_are_dropped_unless_kept(device, manual):
    made = {name: QUANTIZERS[name]()(source_of(device, (32, 48))) for name in QUANTIZERS}
    weights = [torch.nn.Parameter(weight) for weight in made.values()]
    nothing = [None] * len(weights)
    utils.quantize_master_weights(weights, nothing, nothing, None, None, manual)
    for name, weight in zip(made, weights, strict=True):
        turned = name in SQUARES or "squares" in name or name.startswith("tiles")
        kept = not turned or (manual and name != "current")  # whose transpose is of older data
        assert weight.get_usages()["columnwise"] == kept, name
    places = [weight._columnwise_data for weight in weights if hasattr(weight, "_amax_columnwise")]
    utils.post_all_gather_processing(weights)
    assert all(weight.get_usages()["columnwise"] for weight in weights)
    if manual:  # in the same memory
        after = [w._columnwise_data for w in weights if hasattr(w, "_amax_columnwise")]
        assert all(a is b for a, b in zip(places, after, strict=True))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_row_wise_data_in_a_buffer(device, name):
    source = source_of(device, (20, 50))
    weight = QUANTIZERS[name]()(source)
    values, data = weight.dequantize(), programs.row_data(weight)
    buffer = torch.empty(data.numel() + 3, dtype=data.dtype, device=device)
    place = buffer[3:].view(data.shape)
    utils.replace_raw_data(weight, place)
    assert programs.row_data(weight).data_ptr() == place.data_ptr()
    assert_same_bits(weight.dequantize(), values)
    with pytest.raises(ValueError, match=r"replace_raw_data: new_raw_data is torch.int8 \(3,\)"):
        utils.replace_raw_data(weight, torch.empty(3, dtype=torch.int8))


# ---- tensors of programs -------------------------------------------------------------------------


def own_weights(device):
    """Parameters of a class of the program, by itself and in pairs."""
    of_rows, original = "rowwise_dequantized", "original"
    half, mx = HalvesQuantizer(), te.MXFP8Quantizer(E4M3)
    pairs = (half, mx, original), (half, mx, of_rows), (mx, half, original), (half, half, original)
    quantizers = [half]
    for row, column, source in pairs:
        parts = {"rowwise_quantizer": row, "columnwise_quantizer": column}
        quantizers.append(te.HybridQuantizer(**parts, columnwise_source=source))
    start = torch.zeros(24, 48, device=device)
    return quantizers, [torch.nn.Parameter(quantizer(start)) for quantizer in quantizers]


def parts_of(weight):
    parts = (
        getattr(weight, "_rowwise_storage", weight),
        getattr(weight, "_columnwise_storage", None),
    )
    return [part.dequantize(dtype=torch.float32) for part in parts if part is not None]


def test_tensors_of_programs_are_whole_on_each_rank(device, monkeypatch):
    """Nothing of a class of the program is gathered: its bytes are its own affair."""
    values = torch.randn(24 * 48, device=device) * 4
    bounds = [0, 7, 7, 511, values.numel()]

    def update(rank, group, gather):
        quantizers, weights = own_weights(device)
        first, last = bounds[rank : rank + 2]
        mine = values[first:last].clone() if last > first else None
        count = len(weights)
        utils.quantize_master_weights(weights, [mine] * count, [first] * count, group)
        for weight in weights:
            if type(getattr(weight, "_rowwise_storage", weight)) is not Halves:
                data = programs.row_data(weight)
                found = [(first, last, data.view(-1)[first:last].clone())]
                for start, end, codes in (given[0] for given in gather(found)):
                    data.view(-1)[start:end] = codes
        utils.post_all_gather_processing(weights)
        return [parts_of(weight) for weight in weights]

    threads = Threads(len(bounds) - 1)
    monkeypatch.setattr(utils, "_reduce", threads.reduce)
    quantizers, _ = own_weights(device)
    expected = [parts_of(quantizer(values.view(24, 48))) for quantizer in quantizers]
    assert_same_bits(expected[0], [halves_of(values.view(24, 48))])
    for found in threads.run(update):
        assert_same_bits(found, expected)


def test_shards_of_tensors_of_programs(device):
    """Refused before anything is written: nobody knows what of them a shard would be."""
    quantizers, weights = own_weights(device)
    masters = torch.randn(24 * 48, device=device)
    shard = torch.zeros(24 * 48, dtype=torch.uint8, device=device)
    for weight in (weights[0], weights[1]):
        for given in (shard, (shard, None), (None, shard)):
            with pytest.raises(ValueError, match="a shard for a Halves, a class of the program"):
                utils.quantize_master_weights([weight], [masters], [0], None, [given])
    assert_same_bits(parts_of(weights[0]), [torch.zeros(24, 48, device=device)])
    bare = Halves.of(torch.zeros(24, 48, device=device), torch.float32)
    with pytest.raises(RuntimeError, match="Halves: it has no quantizer: give one"):
        utils.quantize_master_weights([bare], [masters], [0], None)
    with pytest.raises(ValueError, match="replace_raw_data: Halves, expected a quantized tensor"):
        utils.replace_raw_data(weights[0], shard)


def test_values_without_a_quantizer(device):
    """An `IdentityTensor` that a program made of values alone."""
    values = torch.randn(24, 48, device=device)
    tensor = IdentityTensor._make_in_reduce_ex(torch.zeros_like(values), None, torch.float32)
    assert tensor._quantizer is None
    utils.quantize_master_weights([tensor], [values.view(-1)[40:400]], [40], None)
    wanted = torch.zeros_like(values)
    wanted.view(-1)[40:400] = values.view(-1)[40:400]
    assert_same_bits(tensor.dequantize(), wanted)


# ---- what can not be -----------------------------------------------------------------------------


def test_what_can_not_be(device):
    weight = torch.nn.Parameter(te.NVFP4Quantizer()(source_of(device, (4, 5))))
    masters = torch.randn(7, device=device)
    call = utils.quantize_master_weights
    squares = te.NVFP4Quantizer(with_2d_quantization=True)
    for one, shard in ((torch.nn.Parameter(squares(weight)), None), (weight, masters[:0])):
        for start in (1, 2):  # the second one ends in the middle of a byte
            with pytest.raises(ValueError, match="cuts a byte, which two values of NVFP4 share"):
                call([one], [masters[:6]], [start], None, [shard])
    tiles = torch.nn.Parameter(te.Float8BlockQuantizer(E4M3)(source_of(device, (4, 5))))
    scaled = torch.nn.Parameter(te.Float8CurrentScalingQuantizer(E4M3)(source_of(device, (4, 5))))
    before = programs.row_data(scaled).clone()
    with pytest.raises(ValueError, match="a shard of 3 bytes for a slice of 7 bytes"):
        short = masters[:3].to(torch.uint8)
        call([scaled, tiles], [masters, masters], [0, 0], None, [None, short])
    assert_same_bits(programs.row_data(scaled), before)
    mx = torch.nn.Parameter(te.MXFP8Quantizer(E4M3)(source_of(device, (4, 5))))
    with pytest.raises(ValueError, match="a shard of 3 bytes for a slice of 7 bytes"):
        call([mx], [masters], [0], None, [(masters.to(torch.uint8), short)])
    with pytest.raises(ValueError, match="a shard is a list of 1, expected a tensor"):
        call([mx], [masters], [0], None, [[short]])
    pair = [masters.to(torch.uint8)] * 2
    rows = torch.nn.Parameter(te.MXFP8Quantizer(E4M3, columnwise=False)(mx.dequantize()))
    hybrid = torch.nn.Parameter(QUANTIZERS["hybrid"]()(mx.dequantize()))
    for one in (tiles, scaled, rows, hybrid):
        with pytest.raises(ValueError, match=f"a column-wise shard for a {type(one).__name__} wi"):
            call([one], [masters], [0], None, [pair])
    with pytest.raises(ValueError, match="a parameter comes twice"):
        call([tiles, tiles], [masters, masters], [0, 7], None)
    with pytest.raises(ValueError, match="a slice of 7 elements that begins at 14, of a weight of"):
        call([tiles], [masters], [14], None)
    tiles.update_usage(rowwise_usage=False)
    with pytest.raises(ValueError, match="a Float8BlockwiseQTensor without row-wise data"):
        call([tiles], [masters], [0], None)
    with pytest.raises(ValueError, match="a Float8BlockwiseQTensor without row-wise data"):
        utils.replace_raw_data(tiles, masters)
