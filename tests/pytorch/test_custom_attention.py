# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 under a CustomRecipe: its roles, and which recipe of attention they make."""

import copy
import pickle

import pytest
import torch
from pytorch.fp8_attention_cases import (
    BACK_TO_16,
    BACK_TO_BACK,
    LAYER,
    attentions,
    module_of,
    run,
    tensors_of,
)
from pytorch.helpers import assert_same_bits, state_of
from pytorch.module_cases import step
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Format,
    QParams,
    QuantizerRole,
)
from transformer_engine.pytorch.constants import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def current(kind=E4M3, **options):
    return te.Float8CurrentScalingQuantizer(kind, None, **options)


def request(**options):
    return DelayedScalingRequest(amax_history_len=4, **options)


def recipe_of(qkv, s=None, do=None, dp=None, linear=te.IdentityQuantizer, **options):
    """A recipe with these for the roles of attention; None: as for `qkv`."""
    made = {"qkv": qkv, "s": s or qkv, "do": do or qkv, "dp": dp or qkv}
    options = {"fp8_dpa": True, **options}
    return CustomRecipe(
        lambda role: (made[role.tensor_type] if role.module_type == "dpa" else linear)(), **options
    )


def doubled(**how):
    """Current scaling with other scales than the recipe's own."""
    made = Float8CurrentScaling(fp8_dpa=True)
    made.fp8_quant_fwd_inp = QParams(**how)
    return made


def e5m2():
    return current(E5M2)


def rounded():
    return current(force_pow_2_scales=True, amax_epsilon=9.0)


CASES = {
    "delayed": (lambda: DelayedScaling(amax_history_len=4, fp8_dpa=True), (request,)),
    "delayed e4m3": (
        lambda: DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, fp8_dpa=True),
        (lambda: request(fp8_format=Format.E4M3),),
    ),
    "current": (lambda: Float8CurrentScaling(fp8_dpa=True), (current, current, e5m2, e5m2)),
    "state of weights": (
        lambda: Float8CurrentScaling(fp8_dpa=True),
        (current, request, current, request),
    ),
    "rounded": (
        lambda: doubled(power_2_scale=True, amax_epsilon=9.0),
        (rounded, current, te.IdentityQuantizer, te.IdentityQuantizer),
    ),
}
"""A recipe of attention, and what a function gives for its roles."""


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_recipe_that_casts_so(device, case, channels, counters):
    theirs, roles = CASES[case]
    delayed = "delayed" in case
    options = {"attn_mask_type": "no_mask"}
    tensors = tensors_of(device, channels, queries=64, keys=64)
    results = []
    for recipe in (theirs(), recipe_of(*roles)):
        te.reset()
        module = module_of(channels, **options)
        counters_before = attentions()
        assert not counters_before
        found = [run(module, [t * (1 + i) for t in tensors], recipe) for i in range(3)]
        results.append((found, attentions(), state_of(module)))
        te.reset_counters()
    (wanted, ran, state), (found, ours, our_state) = results
    one = BACK_TO_BACK if delayed and channels == 128 else BACK_TO_16
    assert ours == ran
    if device == "cpu":
        assert ran == {name: 3 * count for name, count in one.items()}
    assert_same_bits(found, wanted)
    assert (state is None) == (our_state is None) == (not delayed)
    if delayed:
        assert_same_bits(our_state, state)


def test_roles_are_asked_for_once(device):
    asked = []

    def factory(role):
        asked.append(role)
        return request()

    module, recipe = module_of(name="core"), CustomRecipe(factory, fp8_dpa=True)
    for _ in range(2):
        run(module, tensors_of(device), recipe)
    assert asked == [QuantizerRole("dpa", role, "core") for role in ("qkv", "s", "do", "dp")]
    run(module_of(), tensors_of(device), CustomRecipe(factory))  # without fp8_dpa: none
    assert len(asked) == 4


def test_in_high_precision(device, counters):
    tensors, module = tensors_of(device), module_of()
    wanted = run(module, tensors, DelayedScaling())
    assert_same_bits(run(module, tensors, recipe_of(te.IdentityQuantizer)), wanted)
    assert not any("e4m3" in name for name in attentions())


class Own(te.Float8CurrentScalingQuantizer):
    """A quantizer of a program."""


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ((lambda: te.MXFP8Quantizer(E4M3),), "gave 'MXFP8Quantizer' for 'qkv' of attention: it"),
        ((lambda: Own(E4M3, None),), "gave 'Own' for 'qkv'"),
        ((current, lambda: te.Float8BlockQuantizer(E4M3)), "'Float8BlockQuantizer' for 's'"),
        ((current, current, te.NVFP4Quantizer), "'NVFP4Quantizer' for 'do'"),
        ((e5m2, current), "for 'qkv' of attention: it multiplies E4M3, not kFloat8E5M2"),
        ((current, te.IdentityQuantizer), "'IdentityQuantizer' for 's' of attention: all four"),
        ((request, current), r"DelayedScalingRequest\(.*for 'qkv' of attention: all four roles"),
        ((te.IdentityQuantizer, current), "'IdentityQuantizer' for 'qkv' of attention: all four"),
        (
            (lambda: te.Float8Quantizer(torch.ones(1), torch.ones(1), E4M3),),
            "'Float8Quantizer' for 'qkv' of attention: it casts by Float8CurrentScalingQuantizer",
        ),
        (
            (lambda: current(with_amax_reduction=True), current),
            "'Float8CurrentScalingQuantizer' for 'qkv'",
        ),
    ],
)
def test_what_attention_does_not_cast_is_refused_by_name(device, roles, words):
    with pytest.raises(NotImplementedError, match=words):
        run(module_of(), tensors_of(device), recipe_of(*roles))


def test_what_functions_may_not_give(device):
    with pytest.raises(ValueError, match="gave requests that differ"):
        run(module_of(), tensors_of(device), recipe_of(request, lambda: request(margin=1)))
    with pytest.raises(ValueError, match=r"DotProductAttention: .*'dpa'.*gave None"):
        run(module_of(), tensors_of(device), recipe_of(lambda: None))


@pytest.mark.parametrize("case", ["delayed", "current"])
def test_in_a_layer(device, case, counters):
    """Beside linear layers of the same recipe; with the bits of one recipe for all."""
    theirs, roles = CASES[case]
    kinds = {"input": request, "weight": request, "grad_output": request}
    if case == "current":
        kinds = {"input": current, "weight": current, "grad_output": e5m2}
    made = dict(zip(("qkv", "s", "do", "dp"), roles * (4 // len(roles)), strict=True)) | kinds
    ours = CustomRecipe(lambda role: made[role.tensor_type](), fp8_dpa=True)
    layer = te.TransformerLayer(256, 512, 2, device=device, **LAYER)
    x, results = torch.randn(16, 2, 256).to(device, BF16), []
    for recipe in (theirs(), ours):
        te.reset()
        module = copy.deepcopy(layer)
        results.append([step(module, x, recipe) for _ in range(3)])
        assert attentions()["attention.e4m3"] == 3
        te.reset_counters()
    assert_same_bits(*results)


@pytest.mark.parametrize("case", ["delayed", "current"])
def test_recompute_has_the_same_bits(device, case):
    roles, tensors = CASES[case][1], tensors_of(device)
    results = []
    for again in (False, True):
        te.reset()
        found = run(module_of(), tensors, recipe_of(*roles), checkpoint_core_attention=again)
        results.append(found)
    assert_same_bits(*results)


def test_the_environment_goes_before(device, monkeypatch, counters):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "Float8CurrentScaling")
    tensors = tensors_of(device)
    found = run(module_of(), tensors, recipe_of(lambda: te.MXFP8Quantizer(E4M3)))
    wanted = run(module_of(), tensors, Float8CurrentScaling(fp8_dpa=True))
    assert_same_bits(found, wanted)


def test_copies_ask_by_themselves(device):
    module, recipe = module_of(), recipe_of(request)
    tensors = tensors_of(device)
    run(module, tensors, recipe)
    plain = run(module, tensors, recipe)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert len(run(twin, tensors, recipe)) == len(plain)


def test_it_is_explained(device):
    module, shape = module_of(groups=4), (24, 2, 4, 64)
    for roles, words in ((CASES["current"][1], "by Float8CurrentScaling (CustomRecipe); backward"),
                         ((te.IdentityQuantizer,), "none: CustomRecipe")):  # fmt: skip
        with te.autocast(recipe=recipe_of(*roles)):
            text = str(te.explain_attention(module, shape, dtype=BF16))
        assert words in text


def test_it_runs_outside_of_graphs(device):
    torch._dynamo.reset()
    tensors, recipe = tensors_of(device), recipe_of(request)
    results = []
    for compiled in (False, True):
        te.reset()
        module = module_of()
        call = torch.compile(module, backend="aot_eager") if compiled else module
        results.append([run(call, tensors, recipe) for _ in range(2)])
    assert_same_bits(*results)
