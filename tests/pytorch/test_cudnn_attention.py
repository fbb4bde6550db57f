# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA, which cuDNN's kernels run: values, gradients, limits, dropout and capture."""

import concurrent.futures
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from comparators import assert_nmse
from pytorch.cudnn_attention_cases import (
    CHANNELS,
    HEADS,
    SHARING,
    allowed,
    assert_right,
    attended,
    differentiated,
    heads,
    some_heads,
    some_limits,
)
from pytorch.helpers import assert_same_bits, captured
from tols import BF16, F16, F32, tol

from transformer_engine import _core
from transformer_engine.pytorch.attention import DotProductAttention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", range(12))
def test_random_problems(part, seed):
    del part
    rng = random.Random(seed)
    for _ in range(4):
        batch, count = rng.choice([1, 3]), rng.choice([1, 2, 6])
        groups = rng.choice([g for g in range(1, count + 1) if count % g == 0])
        queries = rng.choice([1, 2, 17, 64, 100, 128, 130, 192])
        keys = rng.choice([queries, queries, 1, 3, 64, 77, 128, 192, 200])
        d_k, d_v, dtype = (
            rng.choice([8, 40, 64, 128]),
            rng.choice([16, 64]),
            rng.choice([BF16, F16]),
        )
        orders = [rng.choice(["bshd", "sbhd", "bhsd", "packed"]) for _ in range(3)]
        limits, bias = some_limits(rng, batch, queries, keys), None
        if keys > 1 and rng.random() < 0.4:
            of = rng.choice([(queries, keys), (queries, keys), (1, keys), (queries, 1)])
            shape = (rng.choice([1, batch]), rng.choice([1, count]), *of)
            bias = torch.randn(shape).to("cuda", rng.choice([dtype, dtype, F32]))
        tensors = (
            heads(batch, queries, count, d_k, dtype, orders[0]),
            heads(batch, keys, groups, d_k, dtype, orders[1]),
            heads(batch, keys, groups, d_v, dtype, orders[2]),
            bias,
        )
        print(dtype, [None if t is None else tuple(t.shape) for t in tensors], orders, limits)
        assert_right(tensors, limits, d_k**-0.5)


@pytest.mark.parametrize(("queries", "keys"), [(192, 192), (64, 64), (1, 128), (77, 64)])
@pytest.mark.parametrize("limits", [{}, {"window_right": 0}], ids=["full", "causal"])
def test_very_negative_scores(queries, keys, limits):
    """Of which cuDNN's own gradients are NaN where a block of 128 keys is not whole."""
    ones = torch.ones(2, queries, HEADS, CHANNELS)
    tensors = (
        (ones * -4.0 + 0.1 * torch.randn_like(ones)).to("cuda", BF16),
        (torch.ones(2, keys, HEADS, CHANNELS) * 4.0).to("cuda", BF16),
        heads(2, keys, HEADS, CHANNELS, BF16),
        None,
    )
    *_, statistics = attended(tensors, torch.ones_like(tensors[0]), scale=0.125, **limits)
    assert statistics.max() < -100
    assert_right(tensors, limits, 0.125)


@pytest.mark.parametrize("cap", [0.5, 20.0, 1e6])
@pytest.mark.parametrize("limits", [{}, {"window_right": 0, "window_left": 90}], ids=str)
@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize(("queries", "keys", "groups"), [(256, 256, HEADS), (200, 333, 2)])
def test_softcap(queries, keys, groups, channels, limits, cap):
    tensors = (
        heads(2, queries, HEADS, channels, BF16),
        heads(2, keys, groups, channels, BF16),
        heads(2, keys, groups, channels, BF16),
        None,
    )
    assert_right(tensors, {"softcap": cap, **limits}, 2.0 * channels**-0.5)


@pytest.mark.parametrize(
    "limits", [{}, {"window_right": 0}, {"window_left": 9}, {"softcap": 0.5}], ids=str
)
@pytest.mark.parametrize(("queries", "keys", "groups"), [(128, 128, HEADS), (77, 100, 2)])
def test_dropout(queries, keys, groups, limits):
    """The decisions are read from an output of equal weights, and are those of the gradients."""
    probability = 0.3
    rng = torch.randint(2**40, (2,), device="cuda")
    zeros = torch.zeros(2, queries, HEADS, CHANNELS, device="cuda", dtype=BF16)
    ones = (
        torch.eye(keys, 256).to("cuda", BF16)[None, :, None].expand(2, -1, HEADS, -1).contiguous()
    )
    drops = {"dropout": probability, "rng": rng}
    marked = attended(
        (zeros, zeros.new_zeros(2, keys, HEADS, CHANNELS), ones, None),
        torch.zeros_like(zeros[..., :1]).expand(-1, -1, -1, 256).contiguous(), scale=1.0, **drops,
    )[0]  # fmt: skip
    kept = marked.cpu().transpose(1, 2)[..., :keys] > 0
    decisions = kept.numel() / SHARING
    deviation = math.sqrt(probability * (1 - probability) / decisions)
    assert abs(kept.double().mean() - (1 - probability)) < 5 * deviation
    tensors = (
        heads(2, queries, HEADS, CHANNELS, BF16),
        heads(2, keys, groups, CHANNELS, BF16),
        heads(2, keys, groups, CHANNELS, BF16),
        None,
    )
    grad = torch.randn_like(tensors[0])
    *found, _ = attended(tensors, grad, scale=0.125, **drops, **limits)
    may = allowed(limits, (2, HEADS, queries, keys))
    factors = kept.double() / (1 - probability)
    cap = limits.get("softcap", 0.0)
    exact = differentiated(tensors, grad, torch.float64, may, 0.125, factors, cap)
    for each, right in zip(found, exact, strict=True):
        assert_nmse(each, right, tol("attention", BF16, keys))


def test_everything_and_nothing_is_dropped():
    tensors = [heads(2, 64, HEADS, CHANNELS, BF16) for _ in range(4)]
    rng = torch.randint(2**40, (2,), device="cuda")
    grad = tensors.pop()
    plain = attended((*tensors, None), grad, scale=0.125)
    assert_same_bits(
        attended((*tensors, None), grad, scale=0.125, dropout=0.0, rng=rng)[:3:2], plain[:3:2]
    )
    *found, statistics = attended((*tensors, None), grad, scale=0.125, dropout=1.0, rng=rng)
    assert all((tensor == 0).all() for tensor in found)
    assert_same_bits(statistics, plain[-1])


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(queries, keys):
    query, key = heads(2, queries, HEADS, 64, BF16), heads(2, keys, HEADS, 64, BF16)
    *found, statistics = attended((query, key, key, None), query, scale=1.0)
    assert all((tensor == 0).all() for tensor in found) and (statistics == -math.inf).all()


@pytest.mark.parametrize("of_bias", [(1, HEADS), (1, 1), (3, 1), (3, HEADS)], ids=str)
@pytest.mark.parametrize("of_mask", [(3, 1), (1, HEADS), (3, HEADS)], ids=str)
def test_the_gradient_of_a_bias_beside_a_mask(of_bias, of_mask):
    """The mask has batch entries or heads that share the bias: its gradient is their sum."""
    mask = (torch.rand(*of_mask, 64, 80) < 0.3).to("cuda", torch.uint8)
    mask[:, :, 5] = 1
    bias = torch.randn(*of_bias, 64, 80).to("cuda", BF16)
    assert_right((*some_heads(3, 64, 80), bias), {"mask": mask}, 0.125)


@pytest.mark.parametrize("window", [{}, {"window_right": 0}], ids=str)
def test_the_gradient_of_a_bias_beside_lengths(window):
    """Sequences without tokens add nothing to it, whatever lay in the workspace."""
    lengths = [
        torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, 130, 64], [200, 0, 77])
    ]
    limits = dict(query_lengths=lengths[0], key_lengths=lengths[1], **window)
    for shape in ((1, HEADS), (3, 1)):
        bias = torch.randn(*shape, 130, 200).to("cuda", BF16)
        torch.full((2**25,), math.nan, device="cuda")  # freed, for the allocator to hand out
        assert_right((*some_heads(3, 130, 200), bias), limits, 0.125)


@pytest.mark.parametrize(
    "how", ["turned", "every second", "expanded", "expanded lines", "odd address", "other dtype"]
)
def test_biases_that_lie_oddly(how):
    full = torch.randn(2, HEADS, 64, 88).to("cuda", BF16)
    bias = {
        "turned": full.mT.contiguous().mT,
        "every second": torch.randn(2, HEADS, 64, 176).to("cuda", BF16)[..., ::2],
        "expanded": full[:1, :1].expand(2, HEADS, -1, -1),
        "expanded lines": full[:, :, :1].expand(-1, -1, 64, -1),
        "odd address": torch.randn(2, HEADS, 64, 89).to("cuda", BF16)[..., 1:],
        "other dtype": full.to(F16),
    }[how]
    tensors = some_heads(2, 64, 88)
    grad = torch.randn_like(tensors[0])
    *found, statistics = attended((*tensors, bias), grad, False, scale=0.125)
    plain = bias.contiguous().float() if how == "other dtype" else bias.contiguous()
    *right, expected = attended((*tensors, plain), grad, False, scale=0.125)
    for each, of in zip((*found, statistics), (*right, expected), strict=True):
        assert_nmse(each, of.double(), tol("round", BF16))


FAR = 2**32


@pytest.mark.parametrize(
    "limits",
    [
        {"window_left": FAR, "window_right": FAR},
        {"window_left": 2**60, "window_right": 3},
        {"window_right": 2**60, "diagonal": 2 - 2**60},
        {"window_left": 2**60, "diagonal": 2**60},
        {"window_right": 0, "diagonal": -FAR},
        {"window_left": 0, "diagonal": FAR},
        {"window_left": 5, "window_right": FAR, "diagonal": 4 - FAR},
        {"window_left": 140, "window_right": 200, "bottom_right": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("ends", [None, (20, 90)])
def test_far_windows(limits, ends):
    if ends is not None:
        names = ("query_lengths", "key_lengths")
        tensors = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in ends)
        limits = {**limits, **dict(zip(names, tensors, strict=True))}
    assert_right((*some_heads(1, 64, 100), None), limits, 0.125)


def test_small_tensors_at_odd_addresses():
    """Lengths, the random pair and its second number need no more than their dtypes do."""
    numbers = torch.randint(2**40, (3,), device="cuda")
    ends = torch.tensor([0, 64, 30, 7], dtype=torch.int32, device="cuda")
    tensors = (*some_heads(3, 64), None)
    grad, results = torch.randn_like(tensors[0]), []
    for rng, of in ((numbers[1:], ends[1:]), (numbers[1:].clone(), ends[1:].clone())):
        given = {"rng": rng, "dropout": 0.2, "query_lengths": of, "key_lengths": of}
        results.append(attended(tensors, grad, scale=0.125, window_right=0, **given))
    for each, right in zip(*results, strict=True):
        finite = right.isfinite()
        assert torch.equal(each.isfinite(), finite)
        assert_nmse(each[finite], right[finite].double(), tol("round", BF16))


def test_heads_that_share_memory_are_copied():
    module, tensors = module_and_tensors(length=64)
    query = tensors[0].detach()[:1].expand(2, -1, -1, -1)
    with pytest.raises(NotImplementedError, match="share memory"):
        _core.attention(query, *(t.detach() for t in tensors[1:]), torch.empty_like(tensors[1]))
    expanded, dense = query.requires_grad_(), query.detach().contiguous().requires_grad_()
    results = []
    for each in (expanded, dense):
        given = [each, *tensors[1:]]
        out = module(*given)
        results.append([out.detach(), *torch.autograd.grad(out.mean(1).float().sum(), given)])
    for each, right in zip(*results, strict=True):
        assert_nmse(each, right.double(), tol("round", BF16))


def test_slopes_may_learn():
    module, tensors = module_and_tensors(length=64)
    slopes = torch.rand(HEADS, device="cuda", requires_grad=True)
    out = module(*tensors, core_attention_bias_type="alibi", alibi_slopes=slopes)
    made = torch.autograd.grad(out.float().square().sum(), [slopes, *tensors])
    assert all(grad.isfinite().all() and grad.any() for grad in made)


def module_and_tensors(length=256, **options):
    module = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", **options)
    return module, [heads(2, length, HEADS, CHANNELS, BF16).requires_grad_() for _ in range(3)]


def step(module, tensors, **given):
    out = module(*tensors, **given)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]


@pytest.mark.parametrize("how", ["torch", "environment"])
def test_repeatable_gradients(how, monkeypatch):
    module, tensors = module_and_tensors(length=512)
    _core.reset_counters()
    if how == "torch":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    try:
        found = [step(module, tensors) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    for each in found[1:]:
        assert_same_bits(each, found[0])
    assert _core.counters()["op.cuda.attention_backward"] == 6


def test_heads_at_odd_addresses_are_copied():
    module, tensors = module_and_tensors()
    expected = step(module, tensors)
    moved = []
    for tensor in tensors:
        storage = torch.empty(tensor.numel() + 3, device="cuda", dtype=BF16)
        view = storage[3:].view(tensor.shape)
        view.copy_(tensor.detach())
        moved.append(view.requires_grad_())
    assert moved[0].data_ptr() % 16 != 0
    found = step(module, moved)
    assert_same_bits(found[0], expected[0])
    for each, right in zip(found[1:], expected[1:], strict=True):
        assert_nmse(each, right.double(), tol("round", BF16))


def test_capture():
    """Plans that are met first while a graph is captured are made then."""
    module, tensors = module_and_tensors(length=320, attention_dropout=0.1)
    module.eval()
    other = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", attn_mask_type="no_mask")
    module(*(t[:, :64] for t in tensors))  # the library is loaded
    graph, results = captured(lambda: [*step(module, tensors), other(*tensors)])
    for _ in range(2):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        copies = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        right = [*step(module, copies), other(*copies)]
        for each, expected in zip(results, right, strict=True):
            assert_nmse(each, expected.double(), tol("round", BF16))


def test_threads():
    """Of problems of their own and of one that all share, on streams of their own."""
    module, tensors = module_and_tensors()
    expected = module(*tensors).detach()

    def work(number):
        own, given = module_and_tensors(length=64 + 8 * number)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            alone = own(*given).detach()
            results = [(own(*given).detach(), module(*tensors).detach()) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(a, alone) and torch.equal(b, expected) for a, b in results)

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_memory_is_linear_in_the_length():
    length = 16384
    module, tensors = module_and_tensors(length=length)
    step(module, tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(module, tensors)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 24 * tensors[0].nbytes < 2 * HEADS * length**2


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": F32}, "fp32"),
        ({"channels": 60}, "60 channels"),
        ({"channels": 264}, "264 .*channels"),
    ],
    ids=str,
)
def test_what_the_operator_refuses(changed, text):
    tensor = heads(1, 16, 2, changed.get("channels", 64), changed.get("dtype", BF16))
    with pytest.raises(NotImplementedError, match=text):
        _core.attention(tensor, tensor, tensor, torch.empty_like(tensor))


def test_no_gradient_of_a_bias_with_a_softcap():
    tensors = *some_heads(2, 64), torch.randn(1, HEADS, 64, 64).to("cuda", BF16)
    grad = torch.randn_like(tensors[0])
    with pytest.raises(NotImplementedError, match="gradient of a bias with a softcap"):
        attended(tensors, grad, softcap=2.0)
    attended(tensors, grad, wants_bias=False, softcap=2.0)


@pytest.mark.parametrize("limits", [{}, {"window_right": 0}], ids=["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 128), (100, 77)])
def test_masks_of_whole_queries(queries, keys, limits):
    """What all keys have in common softmax does not see, but for -Inf."""
    mask = torch.zeros(2, 1, queries, 1, dtype=torch.uint8, device="cuda")
    mask[:, :, ::3] = 1
    shapes = ((queries, HEADS), (keys, 2), (keys, 2))
    tensors = [heads(2, length, count, CHANNELS, BF16) for length, count in shapes]
    assert_right((*tensors, None), {"mask": mask, **limits}, 0.125)
    endless = torch.zeros(1, HEADS, queries, 1, device="cuda", dtype=BF16)
    endless[:, :, 5:9] = -math.inf
    limits = {**limits, "mask": mask}
    out = attended((*tensors, endless), torch.randn_like(tensors[0]), False, scale=0.125, **limits)
    assert (out[0][:, 5:9] == 0).all() and all(t.isfinite().all() for t in out[:4])


ONE_QUERY = {
    "full": {},
    "causal": {"window_right": 0},
    "corner": {"window_right": 0, "window_left": 30, "bottom_right": 1},
    "lengths": {"key_lengths": [70, 0, 5]},
}


@pytest.mark.parametrize("keys", [2, 64, 77, 128, 192])
@pytest.mark.parametrize("limits", ONE_QUERY)
@pytest.mark.parametrize("of", ["mask", "bias", "both"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_masks_over_one_query(dtype, of, limits, keys):
    """Rows without a key among others: zeros, and no share in the gradients of keys and values."""
    given = dict(ONE_QUERY[limits])
    if "key_lengths" in given:
        ends = [min(end, keys) for end in given["key_lengths"]]
        given["key_lengths"] = torch.tensor(ends, dtype=torch.int32, device="cuda")
    shapes = ((1, HEADS), (keys, 2), (keys, 2))
    tensors = [heads(3, length, count, CHANNELS, dtype) for length, count in shapes]
    bias = None
    if of != "bias":
        mask = torch.rand(3, HEADS, 1, keys, device="cuda") < 0.5
        mask[0], mask[2, 1] = True, True
        given["mask"] = mask.to(torch.uint8)
    if of != "mask":
        bias = torch.randn(3, HEADS, 1, keys, device="cuda", dtype=dtype)
        bias[1, 0], bias[1, 3, :, ::2] = -math.inf, -math.inf
        bias[:, 2] = -math.inf
    assert_right((*tensors, bias), given, CHANNELS**-0.5)


@pytest.mark.parametrize("mask_type", ["arbitrary", "padding"])
def test_modules_run_masks_over_one_query(mask_type):
    """A step of a decoder: native, with the gradients of float64."""
    module = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", attn_mask_type=mask_type)
    tensors = [heads(2, n, HEADS, CHANNELS, BF16).requires_grad_() for n in (1, 64, 64)]
    masked = torch.rand(2, 1, 1, 64, device="cuda") < 0.5
    masked[1] = True
    none = torch.zeros(2, 1, 1, 1, dtype=torch.bool, device="cuda")
    out = module(*tensors, attention_mask=masked if mask_type == "arbitrary" else (none, masked))
    assert module._last_call.backend == "native"
    grad = torch.randn_like(out)
    found = [out.view_as(tensors[0]), *torch.autograd.grad(out, tensors, grad)]
    may = ~masked.expand(2, HEADS, 1, 64).cpu()
    given = (*tensors, None)
    exact = differentiated(given, grad.view_as(tensors[0]), torch.float64, may, CHANNELS**-0.5)
    for tensor, expected in zip(found, exact, strict=True):
        assert tensor.isfinite().all() and not tensor[1].any()
        assert_nmse(tensor, expected, tol("attention", BF16, 64))


def test_masks_over_one_key_run_elsewhere():
    tensors = [heads(2, n, HEADS, CHANNELS, BF16) for n in (64, 1, 1)]
    mask = torch.rand(1, 1, 64, 1, device="cuda") < 0.5
    with pytest.raises(NotImplementedError, match="over one key"):
        attended((*tensors, None), tensors[0], scale=1.0, mask=mask.to(torch.uint8))
    module = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", attn_mask_type="arbitrary")
    out = module(*tensors, attention_mask=mask)
    assert module._last_call.backend == "unfused"
    assert_same_bits(out == 0, mask[0].expand(2, 64, HEADS * CHANNELS))


FIRST_CALL = """
import hashlib, sys, torch
from transformer_engine.pytorch.attention import DotProductAttention

torch.manual_seed(int(sys.argv[1]))
q = torch.randn(2, 384, 4, 64, device="cuda").bfloat16().requires_grad_()
out = DotProductAttention(4, 64, qkv_format="bshd")(q, q.detach(), q.detach())
out.float().square().sum().backward()
print(hashlib.sha256(out.detach().cpu().view(torch.int16).numpy().tobytes()).hexdigest())
print(bool(q.grad.isfinite().all()))
"""


def test_plans_are_kept_on_disk(tmp_path, seed):
    """A later process takes them from there, and makes what is damaged anew."""

    def run():
        environment = {**os.environ, "TE_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", FIRST_CALL, str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, {p: p.stat().st_mtime_ns for p in tmp_path.rglob("attention-*.bin")}

    printed, files = run()
    assert printed.endswith("True\n") and len(files) == 2
    assert run() == (printed, files)
    damaged = sorted(files)[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again, later = run()
    assert again == printed and later[damaged] > files[damaged]
    assert damaged.read_bytes() != bytes(content)
