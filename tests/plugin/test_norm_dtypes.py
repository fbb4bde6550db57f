# SPDX-License-Identifier: Apache-2.0
"""Norms of several dtypes by plug-ins: those that take them, and those that do not."""

import pytest
import torch
from comparators import assert_bits, assert_nmse
from conformance_faults import fails, implementation
from plugged import register, same, step
from tols import BF16, F16, F32, tol

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.plugin import core as plugin

pytestmark = pytest.mark.usefixtures("manager")

FEATURES = 64
MODULES = {
    "RMSNorm": lambda **o: te.RMSNorm(FEATURES, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(
        FEATURES, 32, normalization="RMSNorm", params_dtype=BF16, device=o["device"]
    ),
}
DTYPES = pytest.mark.parametrize(
    ("given", "of_norm"), [(F32, BF16), (BF16, F32), (F16, BF16)], ids=str
)


def made(name, device, of_norm):
    module = MODULES[name](device=device, dtype=of_norm)
    weight = module.weight if name == "RMSNorm" else module.layer_norm_weight
    weight.data = torch.rand(FEATURES, device=device).to(of_norm) + 0.5
    return module


class Noted:
    """The definitions in torch, which note the dtypes that they are given."""

    def __init__(self, **supports):
        self.calls = []
        for op in ("rmsnorm_fwd", "rmsnorm_bwd"):
            own = implementation(op, "reference.torch").fn
            count = 2 if op == "rmsnorm_fwd" else 4
            register(op, self._noting(own, count), supports=supports.get(op))

    def _noting(self, own, count):
        def run(*args):
            self.calls.append(tuple(each.dtype for each in args[:count]))
            return own(*args)

        return run


def one_dtype(input, weight, *_):
    return input.dtype == weight.dtype


def one_dtype_backward(dy, x, rsigma, gamma, *_):
    return dy.dtype == x.dtype == gamma.dtype


ONE = {"rmsnorm_fwd": one_dtype, "rmsnorm_bwd": one_dtype_backward}


@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_one_that_takes_several_is_given_them(device, name, given, of_norm):
    module, x = made(name, device, of_norm), torch.randn(16, FEATURES, device=device, dtype=given)
    wanted, noted = step(module, x), Noted()
    found = step(module, x, policy=plugin.with_preference("vendor"))
    forward, backward = noted.calls
    assert forward == (given, of_norm)
    output = of_norm if name == "RMSNorm" else BF16
    assert backward == (output, given, F32, of_norm)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert_nmse(mine.float(), theirs.float(), tol("chain", BF16, FEATURES))


@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_one_that_supports_one_dtype_is_not(device, name, given, of_norm):
    """The library's own runs, to its bits; calls of one dtype are the plug-in's."""
    module, x = made(name, device, of_norm), torch.randn(16, FEATURES, device=device, dtype=given)
    wanted, noted = step(module, x), Noted(**ONE)
    for _ in range(3):  # also where a call is found again
        same(step(module, x, policy=plugin.with_preference("vendor")), wanted)
    assert noted.calls == []
    module = made(name, device, BF16)
    x = x.to(BF16)
    step(module, x, policy=plugin.with_preference("vendor"))
    assert noted.calls == [(BF16, BF16), (BF16, BF16, F32, BF16)]


def test_a_switch_of_dtypes_asks_again(device):
    """What a module keeps of calls of one dtype is not taken for those of others."""
    module = made("LayerNormLinear", device, BF16)
    x = torch.randn(16, FEATURES, device=device, dtype=BF16)
    noted = Noted(**ONE)
    with plugin.with_preference("vendor"):
        for _ in range(3):
            module(x)
        assert len(noted.calls) == 3
        native = [module(x.float()) for _ in range(3)]
        assert len(noted.calls) == 3
        module(x)
    assert len(noted.calls) == 4
    assert_bits(native[2], module(x.float()))


@pytest.mark.parametrize("op", ["rmsnorm_fwd", "rmsnorm_bwd"])
def test_check_refuses_and_fails_cases_of_several_dtypes(device, op):
    """Those that `supports` leaves out are told so; who computes in one dtype is found out."""
    own = implementation(op, "reference.torch").fn
    impl = register(op, own, supports=ONE[op])
    report = plugins.check(impl, device=device)
    outcomes = {row.case: row.outcome for row in report.rows}
    mixed = {case for case in outcomes if " by " in case}
    assert report.passed and len(mixed) == 12
    assert {outcomes[case] for case in mixed} == {"refused"}
    assert {outcomes[case] for case in outcomes.keys() - mixed} == {"passed"}

    def of_input(*args):
        """Rounds the factors to the dtype of the input."""
        at, x = (1, 0) if op == "rmsnorm_fwd" else (3, 1)
        return own(*args[:at], args[at].to(args[x].dtype), *args[at + 1 :])

    fails(of_input, op, device, match="float32")
    assert plugins.check(of_input, op, device=device, match="float32 [").passed
