# SPDX-License-Identifier: Apache-2.0
"""DelayedScaling(measure_first=True): what no slot has recorded is cast with its own amax."""

import copy
import io

import pytest
import torch
from pytorch.helpers import assert_same_bits, captured, counted
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

WIDTH, ROWS = 32, 16
MODULES = {
    "linear": lambda d: te.Linear(WIDTH, WIDTH, device=d),
    "normed": lambda d: te.LayerNormLinear(WIDTH, WIDTH, device=d),
    "mlp": lambda d: te.LayerNormMLP(WIDTH, 2 * WIDTH, device=d),
    "layer": lambda d: te.TransformerLayer(
        WIDTH, 2 * WIDTH, 2, hidden_dropout=0.0, attention_dropout=0.0, device=d
    ),
}
SMALL = 1e-7  # of a loss: at scale 1 its gradients round to zero in E5M2


def recipe(**options):
    return DelayedScaling(amax_history_len=4, measure_first=True, **options)


def plain():
    return DelayedScaling(amax_history_len=4)


def batch(device, rows=ROWS):
    return torch.randn(rows, 2, WIDTH, device=device).bfloat16()


def step(model, x, made, run=None, scale=SMALL):
    """Output and gradients of one pass."""
    x = x.clone().requires_grad_()
    with te.autocast(recipe=made):
        out = model(x) if run is None else run(model, x)
    (out.float() * scale).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [out.detach(), x.grad, *grads]


def slots_of(model):
    return [m._slots for m in model.modules() if getattr(m, "_slots", None) is not None]


def settle(model, x, made):
    """Let the host learn that all slots have recorded something."""
    for _ in range(2):
        if x.is_cuda:
            torch.cuda.synchronize()
        step(model, x, made)
    assert [slots.measures for slots in slots_of(model)] == [0] * len(slots_of(model))


def model_on(device, kind):
    return MODULES[kind](device).bfloat16()


@pytest.mark.parametrize("kind", MODULES)
def test_first_pass_has_the_bits_of_current_scaling(device, kind):
    model, x = model_on(device, kind), batch(device)
    twin = copy.deepcopy(model)
    with counted() as first:
        found = step(model, x, recipe())
    expected = step(twin, x, Float8CurrentScaling())
    assert first.fp8 > 0 == first.other
    assert_same_bits(found, expected)
    assert all(grad.any() for grad in found[1:])
    lost = step(copy.deepcopy(twin), x, plain())
    assert not lost[2 if kind == "linear" else -2].any()  # what the field is for


@pytest.mark.parametrize("kind", MODULES)
def test_later_passes_have_the_bits_of_delayed_scaling(device, kind):
    model, x = model_on(device, kind), batch(device)
    step(model, x, recipe())
    twin = copy.deepcopy(model)  # with the state that the first pass has left
    for _ in range(4):
        x = batch(device)
        assert_same_bits(step(model, x, recipe()), step(twin, x, plain()))


def test_host_learns_that_nothing_is_left_to_measure(device):
    model, x = model_on(device, "layer"), batch(device)
    step(model, x, recipe())
    before = {slots.measures for slots in slots_of(model)}
    settle(model, x, recipe())
    assert device == "cpu" or 0 not in before
    texts = []
    for made in (recipe(), plain()):
        texts.append(io.StringIO())
        with te.autocast(recipe=made):
            te.explain(model, x, file=texts[-1])
    texts = [text.getvalue().replace(", measure_first=True", "") for text in texts]
    assert texts[0] == texts[1] != ""


def test_zeros_record_nothing(device):
    """A gradient of zeros, as behind an output layer that begins at zero, leaves the slot new."""
    model, x = model_on(device, "linear"), batch(device)
    for _ in range(3):
        step(model, x, recipe(), scale=0.0)
    (slots,) = slots_of(model)
    backward, history, first = slots.chunk("backward")
    assert backward[first] == 0.0 and not history[:, first].any()
    twin = copy.deepcopy(model)
    found, lost = step(model, x, recipe()), step(twin, x, plain())
    assert found[2].any() and not lost[2].any()
    assert backward[first] > 1.0


def test_microbatches_before_the_first_update_measure_each(device):
    model = model_on(device, "linear")
    batches = [batch(device), 100.0 * batch(device)]
    with te.autocast(recipe=recipe()):
        found = [model(x) for x in batches]
    twin = copy.deepcopy(model)
    with te.autocast(recipe=Float8CurrentScaling()):
        expected = [twin(x) for x in batches]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_recompute(device, kind, reentrant):
    model = model_on(device, kind)
    twin = copy.deepcopy(model)

    def under_checkpoint(module, x):
        return torch_checkpoint(module, x, use_reentrant=reentrant)

    for _ in range(3):
        x = batch(device)
        found = step(model, x, recipe(), under_checkpoint)
        assert_same_bits(found, step(twin, x, recipe()))


@pytest.mark.parametrize("kind", MODULES)
def test_compiled(device, kind):
    torch._dynamo.reset()
    model = model_on(device, kind)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        x = batch(device)
        found = step(model, x, recipe(), lambda _, x: compiled(x))
        assert_same_bits(found, step(twin, x, recipe()))


@pytest.mark.gpu
def test_captured_before_and_after(device):
    """A graph of the first pass measures for ever, where nothing has been recorded."""
    if device == "cpu":
        pytest.skip("graphs of CUDA")
    made = recipe()
    model, x = model_on(device, "linear"), batch(device)
    twin = copy.deepcopy(model)
    with te.autocast(recipe=made), torch.no_grad():
        model(torch.zeros_like(x))  # makes state; only the weight is recorded, and not updated
    te.reset()
    torch.cuda.synchronize()
    static = x.clone()
    step(model, torch.zeros_like(x), made)

    def forward():
        with te.autocast(recipe=made):
            return model(static)

    graph, out = captured(forward)
    for values in (x, 3.0 * x):
        static.copy_(values)
        graph.replay()
        with te.autocast(recipe=made):
            expected = twin(values)
        assert_same_bits([out], [expected])


def test_state_dicts_hold_the_scales_of_the_other_recipe(device):
    model = model_on(device, "linear")
    step(model, batch(device), recipe(), scale=0.0)
    saved = model.state_dict()
    for made in (plain(), recipe()):
        twin = model_on(device, "linear")
        twin.load_state_dict(saved)
        step(twin, batch(device), made, scale=0.0)
        (slots,) = slots_of(twin)
        scale, _, first = slots.chunk("backward")
        assert scale[first] == (1.0 if made == plain() else 0.0)
        forward, _, first = slots.chunk("forward")
        assert forward[first] > 0.0 and forward[first] != 1.0
    assert saved["_extra_state"].numel() > 0
    values = te.Linear(WIDTH, WIDTH, device=device)
    values.load_state_dict(
        {**saved, "weight": saved["weight"].float(), "bias": saved["bias"].float()}
    )
    assert values.fp8_meta["scaling_bwd"].scale.tolist()[0] == 1.0


def test_loading_state_that_has_recorded_nothing(device):
    """A module that has stopped to measure begins again where what it loads knows less."""
    fresh, model = model_on(device, "linear"), model_on(device, "linear")
    x = batch(device)
    with te.autocast(recipe=recipe()):
        saved = fresh.state_dict()
    settle(model, x, recipe())
    model.load_state_dict(saved)
    assert_same_bits(step(model, x, recipe()), step(fresh, x, recipe()))


@pytest.mark.parametrize("length", [1, 4])
def test_copies_before_the_first_update(device, length):
    """An evaluation before training records amaxes, of which no update has made scales yet."""
    made = DelayedScaling(amax_history_len=length, measure_first=True)
    model = model_on(device, "linear")
    x = batch(device)
    with torch.no_grad(), te.autocast(recipe=made):
        model(x)
    twin, loaded = copy.deepcopy(model), model_on(device, "linear")
    loaded.load_state_dict(model.state_dict())
    expected = step(model, 1024 * x, made)
    for other in (twin, loaded):
        assert_same_bits(step(other, 1024 * x, made), expected)


def test_switching_between_the_recipes(device):
    model = model_on(device, "linear")
    x = batch(device)
    step(model, x, recipe(), scale=0.0)
    found = step(model, x, plain())
    assert not found[2].any()  # its scale is 1 there
    step(model, x, recipe(), scale=0.0)
    assert step(model, x, recipe())[2].any()


def test_settings():
    made = recipe()
    assert "measure_first=True" in repr(made) and "measure_first" not in repr(plain())
    assert made != plain() and copy.deepcopy(made) == made
    with pytest.raises(ValueError, match="measure_first"):
        recipe().measure_first = "yes"


@pytest.mark.parametrize(
    "options", [{"scaling_factor_compute_algo": lambda amax, scale, largest, recipe: scale}]
)
def test_refused_together(device, options):
    model = model_on(device, "linear")
    with pytest.raises(NotImplementedError, match="measure_first=True with scaling_factor"):
        step(model, batch(device), recipe(**options))
