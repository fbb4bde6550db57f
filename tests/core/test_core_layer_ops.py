# SPDX-License-Identifier: Apache-2.0
"""Entry points with keywords by table, and what Python backends see of every args struct."""

import inspect

import pytest
import torch
from comparators import assert_bits
from microscaled import forms
from native import fresh_core
from native_cases import CASES, SCORES


@pytest.fixture
def core():
    return fresh_core()


# ---- what a Python backend gets ------------------------------------------------------------------


def lent(core, op, *args, **kwargs):
    """What a Python backend gets of a call, tensors cloned."""
    seen = {}

    def keep(args):
        assert not seen, "called twice"
        for name, value in args.items():
            seen[name] = value.clone() if isinstance(value, torch.Tensor) else value

    core.register_backend("spy", core.DEVICE_CPU, 1, {op: keep})
    getattr(core, op)(*args, **kwargs)
    core.unregister_backend("spy")
    return seen


def stored(kind, value):
    """A number as the args struct holds it."""
    return (
        torch.tensor(value).item() if kind == "float" else {"int": int, "bool": bool}[kind](value)
    )


# What a call does not do without, beyond what the signature requires.
NEEDED = {
    "quantize": {"amax"},
    "dequantize": {"mode", "row", "row_scales"},
    "gemm": {"b_transposed", "d_scale"}
    | {f"{o}_{n}" for o in "ab" for n in ("mode", "row", "row_scales")},
    "norm": {"rsigma"},
    "norm_backward": {"mean", "grad_input"},
    "activation": {"wide"},
    "activation_backward": {"wide"},
    "softcap": {"wide"},
    "dropout_backward": {"bias_grad"},
    "rope": {"cu_seqlens"},
    "cache_append": {"cu_seqlens", "page_table"},
    "cache_gather": {"page_table"},
}


# What goes with none of some others; see the test below.
PACKED = {"query_offsets", "key_offsets", "max_queries", "max_keys"}
SCALED = {"query_scales", "key_scales", "value_scales", "output_scales"}
FORWARD = SCALED | {"output_scale", "output_amax", "weights_amax"}
BACKWARD = SCALED | {
    "grad_output_scales", "grads_scales", "grad_scores_scale", "grads_scale", "grad_scores_amax",
    "grads_amax",
}  # fmt: skip
MICRO = {"row_amax", "column_amax", "column_partials", "rng", "square", "hadamard"}
MICRO |= {"margin", "four_over_six", "scales_to_256", "row_scaled"}
CASTING = ("quantize", "norm", "activation", "activation_backward", "softcap")
APART = {op: MICRO for op in CASTING} | {
    "attention": PACKED | FORWARD,
    "attention_backward": PACKED | BACKWARD,
    "dequantize": {"row_amax", "column_amax", "scales_to_256"},
    "gemm": {
        "multiplied_out", "a_row_amax", "a_column_amax", "b_row_amax", "b_column_amax",
        "a_scales_to_256", "b_scales_to_256",
    },
    "amax": {"hadamard"},
}  # fmt: skip
"""Fields of packed sequences, of FP8 and of NVFP4, which not all others go with."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("op", fresh_core(bind=False).op_names())
def test_a_python_backend_sees_every_field(core, op, whole):
    """By the names of the arguments; what was not given is what the signature says."""
    signature, fields = inspect.signature(getattr(core, op)), core.op_fields(op)
    case = CASES[op](core)
    required = {name for name, *_, required in fields if required}
    assert required == {n for n, p in signature.parameters.items() if p.default is p.empty}
    keep = required | NEEDED.get(op, set())
    keywords = {n: v for n, v in case.kwargs.items() if whole or n in keep}
    bound = signature.bind(*case.args, **keywords)
    parameters = set(signature.parameters) - APART.get(op, set())
    assert not whole or set(bound.arguments) == parameters, "the case lacks some"
    bound.apply_defaults()
    seen = lent(core, op, *case.args, **keywords)
    assert list(seen) == [name for name, *_ in fields]
    for name, kind, _, _ in fields:
        value = bound.arguments[name]
        if kind != "tensor":
            assert seen[name] == stored(kind, value)
            assert type(seen[name]) is type(stored(kind, value))
        else:
            assert (seen[name] is None) == (value is None)
            assert value is None or seen[name].numel() == value.numel()


def test_fields_of_nvfp4(core):
    """Which go with no FP8."""
    x, pair = torch.randn(32, 32).bfloat16(), torch.tensor([3, 4])
    partials = torch.empty(core.AMAX_PARTIALS)
    assert lent(core, "amax", x, partials, hadamard=1)["hadamard"] == 1
    data = forms(core.SCALING_NVFP4, x.shape, "cpu")
    more = {"column_partials": partials, "rng": pair, "hadamard": 1, "square": 0}
    inputs = {"norm": {"kind": 1}, "activation": {"kind": 0}, "softcap": {"cap": 2.0}}
    for op in CASTING:
        first = (x, x) if op == "activation_backward" else (x,)
        own = inputs.get(op.removesuffix("_backward"), {})
        seen = lent(core, op, *first, **own, **data, partials=partials, **more)
        assert set(seen) >= MICRO
        for name, value in (data | more).items():
            if torch.is_tensor(value) and value.dtype is torch.int64:
                assert_bits(seen[name], value)
            elif torch.is_tensor(value):
                assert seen[name].shape == value.shape
            else:
                assert seen[name] == value
    assert lent(core, "dequantize", x.clone(), **data)["row_amax"].shape == (1,)
    operands = {f"{o}_{name}": value for name, value in data.items() for o in "ab"}
    seen = lent(core, "gemm", torch.empty(32, 32), **operands, b_transposed=1)
    for name in APART["gemm"] - {"multiplied_out"}:
        assert seen[name] == 0 if name.endswith("to_256") else seen[name].shape == (1,)


def test_fields_of_packed_sequences(core):
    """Which go with no mask and no bias."""
    query, key = torch.randn(1, 5, 2, 6), torch.randn(1, 7, 2, 6)
    offsets, lengths = torch.tensor([0, 2, 5]).int(), torch.tensor([2, 3]).int()
    given = dict(
        query_offsets=offsets, key_offsets=torch.tensor([0, 3, 7]).int(), max_queries=3,
        max_keys=4, query_lengths=lengths, key_lengths=lengths,
    )  # fmt: skip
    seen = lent(core, "attention", query, key, key, torch.zeros(1, 5, 2, 6), **given)
    assert set(given) >= PACKED
    for name, value in given.items():
        if torch.is_tensor(value):
            assert_bits(seen[name], value)
        else:
            assert seen[name] == value


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_fields_of_fp8(core, op):
    heads = torch.randn(1, 3, 2, 16).to(torch.float8_e4m3fn)
    statistics = torch.zeros(1, 2, 3)
    names = FORWARD if op == "attention" else BACKWARD
    given = {n: torch.rand(2 if n.endswith("scales") else 1) for n in sorted(names)}
    kept = {name: tensor.clone() for name, tensor in given.items()}
    args = (heads, heads, heads, torch.empty_like(heads))
    if op == "attention_backward":
        args = (heads, *args, statistics)
    seen = lent(core, op, *args, **given)
    for name, value in kept.items():
        assert_bits(seen[name].reshape(-1), value)


def test_numbers_and_pointers_of_a_softmax(core):
    case = CASES["softmax"](core)
    seen = lent(core, "softmax", *case.args, **case.kwargs)
    assert_bits(seen["rng"], case.kwargs["rng"])
    assert_bits(seen["mask"], case.kwargs["mask"].view(torch.uint8))
    assert_bits(seen["input"], case.args[0])


def test_scales_and_partials_of_an_activation(core):
    case = CASES["activation"](core)
    seen = lent(core, "activation", *case.args, **case.kwargs)
    assert seen["mode"] == core.SCALING_TENSOR and seen["scale"].tolist() == [1.0]
    assert seen["column"].shape == case.kwargs["column"].shape
    assert seen["row_scales"].shape == (2,) and seen["amax"].shape == (1,)
    assert seen["partials"] is None and seen["amax_partials"].shape == (core.AMAX_PARTIALS,)


def test_bits_of_a_norm(core):
    """Two flags in one member of the struct, each on its own."""
    arguments = {"kind": core.NORM_RMSNORM, "rsigma": torch.ones(2)}
    for zero_centered in (False, True):
        for given in (False, True):
            flags = {"zero_centered": zero_centered, "statistics_given": given}
            seen = lent(core, "norm", torch.ones(2, 3), **flags, **arguments)
            assert {name: seen[name] for name in flags} == flags


# ---- arguments by position and by name -----------------------------------------------------------


def test_keywords_in_any_order(core):
    """The same call, whatever the order of its keywords."""
    case = CASES["softmax"](core)
    results = []
    for names in (list(case.kwargs), list(case.kwargs)[::-1]):
        keywords = {name: case.kwargs[name] for name in names}
        output = torch.zeros(SCORES)
        core.softmax(input=case.args[0], output=output, **keywords)
        results.append(output)
    assert_bits(*results)
    output = torch.zeros(SCORES)
    core.softmax(case.args[0], output, **case.kwargs)
    assert_bits(output, results[0])


WRONG = {
    "missing tensor": (r"softmax: output: missing required argument", ["x"], {}),
    "missing number": (r"norm: kind: missing required argument", ["x"], {}),
    "none": (r"softmax: output: expected a torch.Tensor, got None", ["x", None], {}),
    "twice": (r"softmax: input: given by name and position", ["x", "x"], {"input": "x"}),
    "unknown": (r"softmax: unexpected keyword argument 'outputs'", ["x", "x"], {"outputs": "x"}),
    "too many": (r"softmax: expected 0 to 2 positional arguments, got 3", ["x"] * 3, {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call(core, case):
    text, args, kwargs = WRONG[case]
    x = torch.zeros(1, 1, 2, 2)
    args = [x if value == "x" else value for value in args]
    kwargs = {name: x for name in kwargs}
    with pytest.raises(TypeError, match=text):
        getattr(core, text.split(":")[0])(*args, **kwargs)


def test_a_keyword_with_the_letters_of_another_is_unknown(core):
    with pytest.raises(TypeError, match="unexpected keyword argument 'kin'"):
        core.norm(torch.zeros(2, 2), kin=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kind\u0301'"):
        core.norm(torch.zeros(2, 2), **{"kind\u0301": 0})


# ---- tensors of more than two dims ---------------------------------------------------------------


def test_strides_reach_the_operator(core):
    """A transposed tensor is neither copied on the way in nor refused on the way out."""
    seen = []

    def rope(args):
        seen.append([args[name].data_ptr() for name in ("input", "output")])
        assert args["input"].stride() == x.stride() and args["output"].shape == (2, 5, 3, 8)

    x, out = (torch.zeros(5, 2, 3, 8).transpose(0, 1) for _ in range(2))
    core.register_backend("spy", core.DEVICE_CPU, 1, {"rope": rope})
    core.rope(x, out, freqs=torch.zeros(5, 1, 1, 8))
    core.unregister_backend("spy")
    assert seen == [[x.data_ptr(), out.data_ptr()]]


def test_dims_without_a_legal_view(core):
    x, freqs = torch.zeros(2, 5, 3, 8), torch.zeros(5, 8)
    columns = torch.zeros(2, 5, 3, 16)[..., ::2]
    core.rope(columns, torch.zeros_like(x), freqs=freqs)  # read: copied
    with pytest.raises(ValueError, match="rope: output: its strides .* unit last stride"):
        core.rope(x, columns, freqs=freqs)
    with pytest.raises(ValueError, match=r"rope: output: dim 1: stride 0 .* overlap"):
        core.rope(x, torch.zeros(2, 1, 3, 8).expand(2, 5, 3, 8), freqs=freqs)
    with pytest.raises(ValueError, match="rope: input: it has 0 dims, expected 1 to 4"):
        core.rope(torch.zeros(()), x, freqs=freqs)
    with pytest.raises(ValueError, match="rope: input: it has 5 dims, expected 1 to 4"):
        core.rope(torch.zeros([1] * 5), x, freqs=freqs)


def test_only_a_mask_may_be_bool(core):
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(TypeError, match="softmax: bias: dtype torch.bool is not supported"):
        core.softmax(x, torch.zeros_like(x), bias=x.bool())
    with pytest.raises(TypeError, match="softmax: mask: dtype f32, expected u8"):
        core.softmax(x, torch.zeros_like(x), mask=x)
    outputs = [torch.zeros_like(x) for _ in range(2)]
    mask = torch.tensor([[False, True], [True, False]]).reshape(1, 1, 2, 2)
    for kind, output in zip((torch.bool, torch.uint8), outputs, strict=True):
        core.softmax(x, output, mask=mask.to(kind))
    assert_bits(*outputs)
    assert torch.equal(outputs[0] == 0, mask)


@pytest.mark.parametrize("rng", [torch.zeros(2), torch.zeros(2, dtype=torch.int32)])
def test_rng_is_int64(core, rng):
    x = torch.zeros(2, 2)
    with pytest.raises(TypeError, match=r"dropout_add: rng: dtype \w+, expected i64"):
        core.dropout_add(x, torch.zeros_like(x), rng=rng, dropout=0.5)
    with pytest.raises(ValueError, match="dropout_add: rng: 1 elements, expected at least 2"):
        core.dropout_add(x, x, rng=torch.zeros(1, dtype=torch.int64), dropout=0.5)
