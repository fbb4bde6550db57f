# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers, products and norms of lists run what the policy selects, on cpu and npu."""

import threading

import pytest
import torch
from comparators import assert_bits
from plugged import RECIPES, native, ran, register
from thinning import pairs
from tols import BF16, F32

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.plugin import core as plugin
from transformer_engine.pytorch import optimizers
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.usefixtures("manager")
WHERE = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("npu", marks=pytest.mark.npu),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
SHAPES = (7,), (33, 16), (3, 64, 5)
ADAM, NORM = "multi_tensor_adam", "multi_tensor_l2norm"


class Vendor:
    """An operator on lists that moves all by the signs of gradients, and notes its calls."""

    def __init__(self, op, **options):
        self.calls, self.lists = [], []
        register(op, self.run, **options)

    def run(self, chunk, flag, lists, *numbers):
        self.calls.append((chunk, flag.clone(), copies(lists), numbers))
        self.lists.append(lists)
        for each in lists[1:]:
            for grad, tensor in zip(lists[0], each, strict=True):
                tensor.add_(grad.reshape(tensor.shape).sign().to(tensor.dtype))


def copies(lists):
    return [[tensor.detach().clone() for tensor in each] for each in lists]


def vendors(strict=False, **orders):
    """Vendors first; with orders of operators."""
    made = plugin.SelectionPolicy.from_dict("vendor", strict=strict, per_op_order=orders)
    return plugin.policy_context(made)


def parameters(device, dtype=F32):
    made = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def stepped(device, make=FusedAdam, policy=None, dtype=F32):
    """Parameters and states after a step with given random numbers."""
    torch.manual_seed(5)
    optimizer = make(parameters(device, dtype), lr=0.01)
    before = copies([optimizer.param_groups[0]["params"]])
    with policy or vendors():
        optimizer.step()
    params = optimizer.param_groups[0]["params"]
    return before[0], [*params, *(t for p in params for t in optimizer.state[p].values())]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_bits(one.detach(), other.detach())


# ---- what runs -----------------------------------------------------------------------------------


def adam(**options):
    return lambda params, lr: FusedAdam(params, lr, **options)


STEPS = {
    ADAM: (adam(weight_decay=0.1), F32, 4),
    f"{ADAM} of masters": (adam(master_weights=True), BF16, 5),
    f"{ADAM}_param_remainder": (
        adam(master_weights=True, store_param_remainders=True), BF16, 5,
    ),
    f"{ADAM}_capturable": (adam(capturable=True), F32, 4),
    f"{ADAM}_capturable_master": (adam(capturable=True, master_weights=True), BF16, 5),
    "multi_tensor_sgd without momentum": (FusedSGD, F32, 3),
    "multi_tensor_sgd": (lambda params, lr: FusedSGD(params, lr, momentum=0.9), F32, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
@WHERE
def test_steps_are_those_of_a_program(device, case):
    """The optimizer leaves what the operator itself leaves that a program calls."""
    op, (make, dtype, lists) = case.partition(" ")[0], STEPS[case]
    found, before = Vendor(op), plugins.counts()
    params, left = stepped(device, make, dtype=dtype)
    assert ran(before) == {f"{op}/vendor.test": 1}
    ((chunk, flag, given, numbers),), (changed,) = found.calls, found.lists
    assert len(given) == lists and flag.dtype == torch.int32 and flag.device.type == device
    with vendors(), torch.no_grad():
        getattr(tex, op)(chunk, flag, given, *numbers)
    for mine, theirs in zip(changed, given, strict=True):
        same(mine, theirs)
    assert not all(torch.equal(a, b) for a, b in zip(params, left, strict=False))


@WHERE
def test_norms_and_products(device):
    """Called by programs, with an applier and without one."""
    tensors, flag = parameters(device), torch.zeros(1, dtype=torch.int32, device=device)
    made = torch.full((1,), 5.0, device=device), torch.arange(3.0, device=device)
    given = []

    def norm(chunk, noop, lists, per_tensor=False):
        given.append((len(lists[0]), per_tensor))
        return made

    register(NORM, norm)
    register("multi_tensor_unscale_l2norm", lambda *args: norm(*args[:3], args[4]))
    product = Vendor("multi_tensor_scale")
    number, before = torch.ones(1, device=device), plugins.counts()
    with vendors():
        applied = optimizers.multi_tensor_applier
        assert applied(optimizers.multi_tensor_l2norm, flag, [tensors], True) is made
        assert optimizers.multi_tensor_l2norm(1, flag, [tensors]) is made
        assert optimizers.multi_tensor_unscale_l2norm(1, flag, [tensors], number, True) is made
        applied(optimizers.multi_tensor_scale, flag, [tensors, copies([tensors])[0]], 2.0)
        # Another operator, by this library's own: that calls no operator of somebody else.
        out = copies([tensors])[0]
        optimizers.multi_tensor_scale_tensor(1, flag, [tensors, out], 2 * number)
    same(out, [2 * tensor for tensor in tensors])
    assert given == [(3, True), (3, False), (3, True)]
    assert [call[3] for call in product.calls] == [(2.0,)]
    done = {key: times for key, times in ran(before).items() if not key.endswith("reference.torch")}
    assert done == {
        f"{NORM}/vendor.test": 2,
        "multi_tensor_unscale_l2norm/vendor.test": 1,
        "multi_tensor_scale/vendor.test": 1,
    }


@WHERE
def test_lists_without_tensors_are_nobodys(device):
    found = Vendor(NORM)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    with vendors(strict=True):
        assert optimizers.multi_tensor_l2norm(1, flag, [[]])[0].tolist() == [0.0]
        with pytest.raises(TypeError, match="tensor_lists.*float, expected a list"):
            optimizers.multi_tensor_l2norm(1, flag, [3.0])
        assert optimizers.multi_tensor_adam() is optimizers.multi_tensor_adam
    assert not found.calls


@WHERE
def test_implementations_ask_nobody(device):
    """One that calls the operator again gets this library's own."""
    modes = []

    def run(*args):
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled(device)))
        return optimizers.multi_tensor_adam(*args)

    register(ADAM, run)
    expected = stepped(device, policy=ours())
    with torch.autocast(device, BF16):  # which does not say how it computes
        found = stepped(device)
    same(found[1], expected[1])
    assert modes == [(False, False)]


@WHERE
def test_ours_ask_nobody(device):
    """By the names of `transformer_engine_torch` under a policy that prefers somebody else."""
    found = Vendor(NORM)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    with vendors():
        native(NORM)(1, flag, [parameters(device)])
    assert not found.calls


@WHERE
def test_scopes(device):
    """A policy counts in its block and thread; an order of one operator leaves the others."""
    found, sgd = Vendor(ADAM), Vendor("multi_tensor_sgd")
    with vendors():
        native_alone = plugin.SelectionPolicy(per_op_order=[("*", ("impl:default.native",))])
        other = device, FusedAdam, plugin.policy_context(native_alone)
        thread = threading.Thread(target=stepped, args=other)
        thread.start()
        thread.join()
    assert not found.calls
    orders = {ADAM: ["vendor"], "multi_tensor_sgd": ["flagos"]}
    with plugin.policy_context(plugin.SelectionPolicy.from_dict(per_op_order=orders)):
        for make in (FusedAdam, FusedSGD):
            stepped(device, make, plugin.policy_context(plugin.get_policy()))
    assert len(found.calls) == 1 and not sgd.calls
    stepped(device, policy=plugin.with_preference("flagos"))
    assert len(found.calls) == 1 + (device == "npu")  # without kernels of ours others are asked


# ---- what does not run ---------------------------------------------------------------------------


@WHERE
def test_a_call_that_is_not_taken_goes_on(device):
    """To the next one, in the end to this library's own."""
    asked = []

    def supports(chunk, flag, lists, *numbers):
        asked.append(len(lists))
        return "four lists are one too many"

    found = Vendor(ADAM, supports=supports)
    other = Vendor("multi_tensor_sgd", supported_dtypes={"float16"})
    for make in (FusedAdam, FusedSGD):
        got = stepped(device, make)
        expected = stepped(device, make, plugin.with_denied_vendors("test"))
        same(got[1], expected[1])
    assert asked == [4] and not found.calls and not other.calls
    explained = plugins.explain(ADAM, device=device)
    (said,) = [one.said for one in explained.candidates if one.impl.impl_id == "vendor.test"]
    assert said == "four lists are one too many"


@pytest.mark.parametrize("policy", ["strict", "order"])
@WHERE
def test_refusals(device, policy):
    """NotImplementedError that names operator, device, who was asked, and why; nothing changes."""
    Vendor(ADAM, supports=lambda *_: "not today")
    context = vendors(strict=True) if policy == "strict" else vendors(**{ADAM: ["vendor"]})
    optimizer = FusedAdam(parameters(device))
    before = copies([optimizer.param_groups[0]["params"]])[0]
    with context, pytest.raises(NotImplementedError, match=ADAM) as caught:
        optimizer.step()
    text = str(caught.value) + "".join(caught.value.__notes__)
    assert "vendor.test (not today)" in text and f"{ADAM} on {device}" in text
    same(optimizer.param_groups[0]["params"], before)
    error = NotImplementedError if device == "npu" else RuntimeError
    with vendors(multi_tensor_sgd=["vendor"]), pytest.raises(error, match="multi_tensor_sgd"):
        FusedSGD(parameters(device), lr=0.1).step()


@WHERE
def test_errors_say_whose_they_are(device):
    def run(*args):
        raise ValueError("no such chunk")

    register(ADAM, run)
    with pytest.raises(ValueError, match="no such chunk") as caught:
        stepped(device)
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised by vendor.test, an implementation of {ADAM}")


# ---- quantized parameters ------------------------------------------------------------------------


def quantized(device, recipe, make, policy):
    """Weights, masters and what ran in three steps of a module with quantized parameters."""
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        model = te.Linear(64, 32, params_dtype=BF16, device=device)
    optimizer, before = make(model.parameters(), lr=0.1), plugins.counts()
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device=device).to(BF16)
        with policy():
            optimizer.step()
    states = [t for p in model.parameters() for t in optimizer.state[p].values()]
    done = {key for key in ran(before) if key.startswith("multi") and key.endswith("vendor.test")}
    return [model.weight.dequantize(), model.bias, *states], done


def ours():
    return plugin.with_denied_vendors("test")


@pairs(
    recipe=("delayed", "current", "block", "mxfp8"),
    make=("adam", "capturable", "sgd"),
    fp8=(False, True),
)
@WHERE
def test_quantized_parameters(device, recipe, make, fp8):
    """The operator updates masters, and casts follow it; or one on FP8 parameters has both."""
    masters = {"master_weights": True}
    op, optimizer = {
        "adam": (ADAM, adam(**masters)),
        "capturable": (f"{ADAM}_capturable", adam(**masters, capturable=True)),
        "sgd": ("multi_tensor_sgd", lambda params, lr: FusedSGD(params, lr, momentum=0.9)),
    }[make]
    expected, nothing = quantized(device, recipe, optimizer, ours)
    assert not nothing
    names = {op, f"{op}_master"} if make == "capturable" else {op}
    for name in names | ({f"{ADAM}_fp8"} if fp8 else set()):
        fn = native(name)
        register(name, lambda *args, fn=fn: fn(*args))
    found, done = quantized(device, recipe, optimizer, vendors)
    same(found, expected)
    by_fp8 = fp8 and make == "adam" and recipe == "delayed"
    assert done == {f"{name}/vendor.test" for name in (*names, *[f"{ADAM}_fp8"] * by_fp8)}


# ---- what is told --------------------------------------------------------------------------------


@WHERE
def test_coverage_and_explanation(device):
    last = "reference.torch" if device == "npu" else "default.native"
    bare = plugins.coverage(device).row(ADAM)
    assert [one.impl_id for one in bare.runners] == [last] and bare.runs is None
    Vendor(ADAM)
    stepped(device)
    stepped(device, policy=ours())
    with vendors():
        row = plugins.coverage(device).row(ADAM)
        text = str(plugins.explain(ADAM, device=device))
        closed = plugins.coverage(
            device, plugin.SelectionPolicy(per_op_order=[(NORM, ("vendor",))])
        ).row(NORM)
    assert [one.impl_id for one in row.runners] == ["vendor.test", last]
    assert row.runners[0].calls == 1 and " 1  vendor.test" in text
    assert not closed.runners and "vendor" in closed.closed
    if device == "npu":
        assert row.runners[1].calls == bare.runners[0].calls + 1
        assert " 2  reference.torch" in text and "no kernels for npu" in text
        assert plugins.counts()[f"{ADAM}/reference.torch"] == row.runners[1].calls
        with plugin.policy_context(plugin.SelectionPolicy("reference")):
            first = plugins.coverage(device).row(ADAM).runners[0]
            assert first.kind == "reference"
            assert plugins.explain(ADAM, device=device).selected.impl_id == first.impl_id
