# SPDX-License-Identifier: Apache-2.0
"""Plans as custom calls of XLA: the bits of a run under torch, states, transforms, errors."""

import functools
import threading

import jax
import jax.numpy as jnp
import native
import numpy as np
import pytest
import torch
from jax_arrays import assert_same, bits, to_jax
from thinning import pairs_first

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import OperandCast, Quantization
from transformer_engine.common.plan_text import make_plan
from transformer_engine.jax import custom_calls
from transformer_engine.jax.custom_calls import call_plan

IN, HIDDEN, OUT, SLOTS = 48, 80, 32, 8
RECIPES = ("none", "delayed", "current", "block")
TORCH = {_core.DTYPE_F32: torch.float32, _core.DTYPE_BF16: torch.bfloat16}
BOTH = (_core.DIRECTION_FORWARD, _core.DIRECTION_BACKWARD)


def linear_spec(dtype, recipe, features, first=False, last=False):
    """A linear layer with a bias, all of whose tensors are of one dtype."""
    dtypes = _core.DTYPE_E4M3, _core.DTYPE_E4M3, _core.DTYPE_E5M2
    casts = (OperandCast(getattr(_core, f"RECIPE_{recipe.upper()}"), of) for of in dtypes)
    parameter = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
    flags = graphs.LinearFlags(
        input=_core.VALUE_GRADIENT if first else 0, weight=parameter, bias=parameter
    )
    return graphs.LinearSpec(*features, *[dtype] * 5, Quantization(*casts), flags)


def module_graph(kind, dtype, recipe):
    """The graph of te.Linear, LayerNormLinear or LayerNormMLP."""
    spec = functools.partial(linear_spec, dtype, recipe)
    parameter = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
    norm = graphs.Norm(_core.NORM_LAYERNORM, dtype, 1e-5, parameter, parameter, output=0)
    if kind == "linear":
        return graphs.call_graph(graphs.CallSpec((spec((IN, OUT), first=True),)))
    if kind == "layernorm_linear":
        return graphs.call_graph(graphs.CallSpec((spec((IN, OUT), first=True),), norm))
    parts = spec((IN, HIDDEN), first=True), spec((HIDDEN, OUT))
    activation = graphs.Activation(_core.ACTIVATION_GELU)
    names = {"names": ("fc1_", "fc2_")}
    return graphs.call_graph(graphs.CallSpec(parts, norm, activation, **names))


def fresh_memory(graph, leading, device="cpu"):
    """What the plans of a graph are given, by link."""
    memory = {}
    for number, value in enumerate(graph.values):
        dims = [extent if isinstance(extent, int) else extent.add for extent in value.shape]
        if value.flags & _core.VALUE_LEADING:
            dims = [*leading, *dims[1:]]
        make = functools.partial(torch.randn, *dims, dtype=TORCH[value.dtype], device=device)
        if value.flags & (_core.VALUE_INPUT | _core.VALUE_PARAMETER):
            memory["value", number] = make()
        if value.flags & _core.VALUE_RESULT:
            memory["gradient", number] = make()
    return memory


def fresh_state(device="cpu"):
    """Scales and a row of amaxes, by slots."""
    scale = 2.0 ** torch.randint(-2, 3, (SLOTS,), device=device).float()
    return {("scale", 0): scale, ("history", 0): torch.zeros(1, SLOTS, device=device)}


def links_of(plan, *roles, written=False):
    """Links of a plan's buffers of some roles, in plan order."""
    found = (b for b in plan.described.buffers if b.role in roles and (not written or b.written))
    return [(b.link, b.of) for b in found]


def run_torch(plan, memory, packed=None, slot=0, rows=()):
    """Run a plan on tensors by link, the states changed in place; what it makes joins them."""
    given = [memory[link] for link in links_of(plan, "input", "parameter", "state")]
    reads = plan.described.direction != "forward" and links_of(plan, "saved")
    *outputs, made = _core.run(plan.native, slot, slot, *given, *([packed] if reads else []), *rows)
    memory.update(zip(links_of(plan, "output"), outputs, strict=True))
    return made


def run_jax(plan, memory, saved=(), slot=0, rows=-1):
    """The same on arrays, under jit; new states replace the old ones. Returns what it saves."""
    given = [memory[link] for link in links_of(plan, "input", "parameter", "state")]
    reads = plan.described.direction != "forward" and links_of(plan, "saved")
    call = jax.jit(lambda given, saved: call_plan(plan, given, saved, rows=rows, slots=(slot,)))
    results = call(given, saved if reads else ())
    memory.update(zip(links_of(plan, "output"), results.outputs, strict=True))
    memory.update(zip(links_of(plan, "state", written=True), results.states, strict=True))
    return results.saved


def check_both(graph, leading, device, slot=0):
    """Forward and backward have the bits of runs under torch."""
    memory, states = fresh_memory(graph, leading, device), []
    for _ in BOTH:
        states.append(fresh_state(device))
    arrays = {link: to_jax(tensor) for link, tensor in memory.items()}
    packed, saved = None, ()
    for direction, state in zip(BOTH, states, strict=True):
        plan = graph.make(direction)
        memory |= state
        arrays |= {link: to_jax(tensor) for link, tensor in state.items()}
        made = run_torch(plan, memory, packed, slot)
        made_arrays = run_jax(plan, arrays, saved, slot)
        if direction == _core.DIRECTION_FORWARD:
            packed, saved = made, made_arrays
        for link in (*links_of(plan, "output"), *links_of(plan, "state", written=True)):
            assert_same(arrays[link], memory[link])
    return arrays


CASES = pairs_first(
    ["linear", "layernorm_linear", "layernorm_mlp"],
    [_core.DTYPE_F32, _core.DTYPE_BF16],
    RECIPES,
    [(2, 3), (130,)],
)


@pytest.mark.parametrize(("kind", "dtype", "recipe", "leading"), CASES)
def test_modules_have_the_bits_of_a_run(device, kind, dtype, recipe, leading):
    arrays = check_both(module_graph(kind, dtype, recipe), leading, device, slot=1)
    amaxes = arrays["history", 0]
    assert recipe != "delayed" or float(amaxes[0, 1]) > 0.0 == float(amaxes[0, 0])


@pytest.mark.parametrize("leading", [(), (5,), (0,), (2, 0, 3), (1, 1), (2, 1, 3, 1, 2)])
def test_leading_dims(leading):
    check_both(module_graph("layernorm_linear", _core.DTYPE_F32, "delayed"), leading, "cpu")


def attention_plans():
    """Plans with attention, rotary embedding and dropout: four dims, any lengths, random pairs."""
    graph = native.attention_graph(_core, _core.RECIPE_DELAYED)
    return [make_plan(direction, graph) for direction in BOTH]


def test_attention_and_dropout():
    """Of any dtype, so not on a GPU: cuDNN runs attention there."""
    seq, batch, width = 5, 2, native.HEADS * native.HEAD
    forward, backward = attention_plans()
    names = {b.name: (b.link, b.of) for p in (forward, backward) for b in p.described.buffers}
    sizes = {"input": (seq, batch, width), "angles": (seq, native.HEAD)}
    sizes |= {"qkv_weight": (3 * width, width), "qkv_bias": (3 * width,), "add_bias": (width,)}
    sizes["grad_output"] = (seq, batch, width)
    memory = {names[name]: torch.randn(*shape) for name, shape in sizes.items()}
    memory[names["add_rng"]] = torch.tensor([2**40 + 3, 12])
    memory |= fresh_state()
    arrays = {link: to_jax(tensor) for link, tensor in memory.items()}
    packed, saved = run_torch(forward, memory), run_jax(forward, arrays)
    run_torch(backward, memory, packed)
    run_jax(backward, arrays, saved)
    for link in (*links_of(forward, "output"), *links_of(backward, "output"), ("history", 0)):
        assert_same(arrays[link], memory[link])


def test_a_plan_that_is_told_its_rows():
    """The weight gradients that a backward has put off: none of their inputs has leading dims."""
    graph = native.Graph(_core, _core.RECIPE_CURRENT)
    x, y = graph.input(IN), graph.result(OUT)
    graph.linear(x, y, weight_flags=_core.VALUE_DEFER)
    plans = [make_plan(d, graph) for d in (*BOTH, _core.DIRECTION_DEFERRED)]
    memory = fresh_memory(graph, (2, 3))
    arrays = {link: to_jax(tensor) for link, tensor in memory.items()}
    packed, saved = run_torch(plans[0], memory), run_jax(plans[0], arrays)
    for plan, rows in zip(plans[1:], ((), (6,)), strict=True):
        run_torch(plan, memory, packed, rows=rows)
        run_jax(plan, arrays, saved, rows=rows[0] if rows else -1)
    (link,) = links_of(plans[2], "output")
    assert_same(arrays[link], memory[link])


# ---- states --------------------------------------------------------------------------------------


def delayed_call(leading=(2, 3)):
    """A forward plan of te.Linear under delayed scaling, with its arrays."""
    graph = module_graph("linear", _core.DTYPE_F32, "delayed")
    memory = fresh_memory(graph, leading) | fresh_state()
    plan = graph.make(_core.DIRECTION_FORWARD)
    given = [memory[link] for link in links_of(plan, "input", "parameter", "state")]
    return plan, [to_jax(tensor) for tensor in given]


@pytest.mark.parametrize("jitted", [False, True])
def test_states_are_not_changed_in_place(jitted):
    plan, arrays = delayed_call()
    before = [bits(array).copy() for array in arrays]
    call = functools.partial(call_plan, plan)
    (state,) = (jax.jit(call) if jitted else call)(arrays).states
    assert all(map(np.array_equal, map(bits, arrays), before))
    assert float(state[0, 0]) == float(jnp.abs(arrays[0]).max()) and float(arrays[-1].max()) == 0.0


def test_a_donated_state_is_reused():
    plan, arrays = delayed_call()
    call = jax.jit(lambda state, rest: call_plan(plan, [*rest, state]).states, donate_argnums=0)
    state = jnp.array(arrays[-1])
    (new,) = call(state, arrays[:-1])
    assert state.is_deleted() and float(new[0, 0]) == float(jnp.abs(arrays[0]).max())


def test_steps_in_a_scan():
    """The state is the carry: amaxes of all steps meet in it; outputs are those of single calls."""
    plan, (x, *rest, state) = delayed_call()
    inputs = jnp.stack([x * factor for factor in (1.0, 4.0, 2.0)])

    def step(state, x):
        results = call_plan(plan, [x, *rest, state])
        return results.states[0], results.outputs[0]

    last, outputs = jax.jit(lambda state: jax.lax.scan(step, state, inputs))(state)
    assert float(last[0, 0]) == 4.0 * float(jnp.abs(x).max())
    for x, output in zip(inputs, outputs, strict=True):
        (alone,) = call_plan(plan, [x, *rest, state]).outputs
        assert np.array_equal(bits(output), bits(alone))


# ---- transforms and threads ----------------------------------------------------------------------


def test_batches_are_single_calls():
    plan, (x, weight, *rest) = delayed_call()
    batch = jnp.stack([x, 3.0 * x, -x], axis=1)
    results = jax.jit(jax.vmap(lambda x: call_plan(plan, [x, weight, *rest]), in_axes=1))(batch)
    for i in range(3):
        alone = call_plan(plan, [batch[:, i], weight, *rest])
        assert np.array_equal(bits(results.outputs[0][i]), bits(alone.outputs[0]))
        assert np.array_equal(bits(results.states[0][i]), bits(alone.states[0]))


def test_a_plan_has_no_gradient_of_its_own():
    plan, (x, *rest) = delayed_call()
    with pytest.raises(NotImplementedError, match="te_plan"):
        jax.grad(lambda x: call_plan(plan, [x, *rest]).outputs[0].sum())(x)


def test_the_jaxpr_names_the_dtypes_of_fp8():
    plan, arrays = delayed_call()
    text = str(jax.make_jaxpr(functools.partial(call_plan, plan))(arrays))
    assert "f8_e4m3fn" in text and plan.text not in text


def test_threads():
    plan, arrays = delayed_call((64,))
    call = jax.jit(functools.partial(call_plan, plan))
    expected = [bits(call(arrays).outputs[0])] * 20
    found = [[] for _ in range(2)]

    def work(mine):
        mine += [bits(call(arrays).outputs[0]) for _ in expected]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(m) == 20 and all(map(np.array_equal, m, expected)) for m in found)


def test_programs_share_a_plan_with_the_process():
    plan, arrays = delayed_call()
    before = _core.plan_count()
    for _ in range(2):
        jax.jit(lambda *given: call_plan(plan, given).outputs)(*arrays)
    assert _core.plan_count() == before


# ---- errors --------------------------------------------------------------------------------------


def test_wrong_numbers_of_arrays():
    plan, arrays = delayed_call()
    with pytest.raises(TypeError, match="expected 5 arrays and 0 saved ones, got 4 and 0"):
        call_plan(plan, arrays[:-1])
    with pytest.raises(TypeError, match="got 5 and 1"):
        call_plan(plan, arrays, [jnp.zeros(4, jnp.uint8)])


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda x: x[..., :-1], "plan: input: dim 1 has size 47, expected 48"),
        (1, lambda w: w.astype(jnp.bfloat16), "plan: weight: dtype bf16, expected f32"),
        (1, lambda w: w.astype(jnp.int16), "weight: XLA's dtype 3 has no counterpart"),
        (2, lambda b: b[None], "plan: bias: 2 dims, expected 1"),
        (3, lambda s: s[:2], "plan: scale: slot 2 is outside the chunk of 2 slots"),
    ],
)
def test_wrong_arrays(at, change, text):
    plan, arrays = delayed_call()
    arrays[at] = change(arrays[at])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{text}"):
        jax.block_until_ready(jax.jit(lambda given: call_plan(plan, given, slots=(1,)))(arrays))


def test_too_few_dims():
    plan, (_, *rest) = delayed_call()
    with pytest.raises(ValueError, match="plan: input: 0 dims, expected at least 1"):
        call_plan(plan, [jnp.float32(1.0), *rest])


def test_too_few_slots():
    plan, arrays = delayed_call()
    with pytest.raises(jax.errors.JaxRuntimeError, match="slots: expected 1"):
        jax.block_until_ready(call_plan(plan, arrays, slots=()))


def test_stages_of_the_program_are_refused():
    graph = native.Graph(_core)
    x, y = graph.input(IN), graph.result(OUT)
    graph.linear(x, y, external=native.external(_core, "quantize_input"))
    plan = make_plan(_core.DIRECTION_FORWARD, graph)
    memory = fresh_memory(graph, (2, 3)) | fresh_state()
    arrays = [to_jax(memory[link]) for link in links_of(plan, "input", "parameter", "state")]
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED.*a function of the prog"):
        jax.jit(functools.partial(call_plan, plan)).lower(arrays).compile()


def test_registration_is_repeated_by_nobody():
    custom_calls.register()
    assert custom_calls.register.cache_info().misses == 1
