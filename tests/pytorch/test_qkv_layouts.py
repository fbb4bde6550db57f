# SPDX-License-Identifier: Apache-2.0
"""The fifteen layouts of queries, keys and values: results, and that nothing is copied for them."""

import pytest
import torch
from comparators import assert_bits, assert_nmse
from thinning import chosen, in_turns
from tols import BF16, F32, tol
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine.pytorch.attention import DotProductAttention

HEADS, CHANNELS, BATCH, LENGTH = 4, 16, 3, 40
FORMS = pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
LAYOUTS = [(together, dim) for together in ("qkv", "kv") for dim in (-3, -2)] + [("none", -3)]
"""What is in one tensor, and the dim that counts it."""
LAYOUT = pytest.mark.parametrize(("together", "dim"), LAYOUTS)

LEAD = {"sbhd": (LENGTH, BATCH), "bshd": (BATCH, LENGTH), "thd": (BATCH * LENGTH,)}
VIEWS = {
    "view", "_unsafe_view", "unbind", "select", "slice", "unsqueeze", "squeeze", "permute",
    "transpose", "t", "expand", "detach", "alias", "as_strided", "split", "split_with_sizes",
    "_reshape_alias",
}  # fmt: skip
"""Operators of torch that copy nothing."""


class Seen(TorchDispatchMode):
    """Names of what runs, but for views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS and not name.startswith(("empty", "new_empty")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def problem(form, together, dim, dtype, device):
    """(module, leaves, arguments of its call, the three views of the leaves)."""
    module = DotProductAttention(
        HEADS, CHANNELS, qkv_format=form, attn_mask_type="padding_causal", attention_dropout=0.0
    )
    lead = LEAD[form]
    lengths = torch.tensor([17, 0, LENGTH])
    sums = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    given = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
    if form == "thd":
        starts = torch.arange(BATCH + 1, device=device, dtype=torch.int32) * LENGTH
        given |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
        given |= {"max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH, "pad_between_seqs": True}

    def leaf(count):
        shape = [*lead, HEADS, CHANNELS]
        if count > 1:
            shape.insert(len(shape) + 1 + dim, count)
        return torch.randn(shape).to(device, dtype).requires_grad_()

    if together == "qkv":
        leaves = [leaf(3)]
        return module, leaves, given | {"qkv_layer": leaves[0], "qkv_interleave_dim": dim}
    if together == "kv":
        leaves = [leaf(1), leaf(2)]
        named = {"query_layer": leaves[0], "kv_layer": leaves[1], "qkv_interleave_dim": dim}
        return module, leaves, given | named
    leaves = [leaf(1) for _ in range(3)]
    names = ("query_layer", "key_layer", "value_layer")
    return module, leaves, given | dict(zip(names, leaves, strict=True))


def apart(leaves, together, dim):
    """Query, key and value of leaves, as leaves of their own."""
    if together == "qkv":
        parts = leaves[0].unbind(dim)
    elif together == "kv":
        parts = (leaves[0], *leaves[1].unbind(dim))
    else:
        parts = leaves
    return [part.detach().clone().requires_grad_() for part in parts]


@FORMS
@LAYOUT
@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
@pytest.mark.parametrize("recompute", [False, True])
def test_results_are_those_of_separate_tensors(device, backend, form, together, dim, recompute):
    module, leaves, given = problem(form, together, dim, BF16, device)
    out = module(**given, checkpoint_core_attention=recompute)
    grad = torch.randn(out.shape).to(out)
    grads = torch.autograd.grad(out, leaves, grad)
    parts = apart(leaves, together, dim)
    named = {name: value for name, value in given.items() if "seq" in name}
    right = module(*parts, **named)
    assert module._last_call.backend == backend
    assert_bits(out, right)
    expected = torch.autograd.grad(right, parts, grad)
    found = apart(grads, together, dim)
    for each, wanted in zip(found, expected, strict=True):
        if device == "cpu" and backend == "native":
            assert_bits(each, wanted)
        else:  # torch's products depend on strides; on CUDA the order of sums on the run
            assert_nmse(each, wanted.double(), tol("round", BF16))
    for each, leaf in zip(grads, leaves, strict=True):
        assert each.shape == leaf.shape
        assert backend == "unfused" or each.is_contiguous()


@FORMS
@LAYOUT
def test_nothing_is_copied(device, form, together, dim):
    """One plan in each direction; but for lengths, which are differences of sums."""
    module, leaves, given = problem(form, together, dim, BF16, device)
    with Seen() as seen:
        out = module(**given)
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert module._last_call.backend == "native"
    assert [name for name in seen.names if name != "sub"] == ["run", "run"]
    assert seen.names.count("sub") == 1


OTHER_FORMS = in_turns(LAYOUTS, ["bshd", "thd"])


# Forms differ in shapes alone, and one of them goes through Inductor on a CPU.
@chosen(
    [*((layout, "sbhd") for layout in LAYOUTS), *OTHER_FORMS],
    layout=LAYOUTS,
    form=["sbhd", "bshd", "thd"],
)
def test_compiled(device, form, layout):
    together, dim = layout
    torch.compiler.reset()
    # Forms differ in shapes alone: on a CPU, where Inductor takes seconds, it compiles one of them.
    options = {} if device == "cuda" or form == "sbhd" else {"backend": "aot_eager"}
    module, leaves, given = problem(form, together, dim, F32 if device == "cpu" else BF16, device)
    made = []
    for function in (module, torch.compile(module, fullgraph=True, **options)):
        out = function(**given)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert_bits(made[1][0], made[0][0])
    for each, wanted in zip(*made, strict=True):
        assert_nmse(each, wanted.double(), tol("round", each.dtype))
