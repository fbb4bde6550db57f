# SPDX-License-Identifier: Apache-2.0
"""What a layer is called with and by whom: layouts, wrong tensors, threads, and other layers.

It gives the bits of its modules, or raises what they raise.
"""

import contextlib
import copy
import threading
from functools import partial

import pytest
import torch
from pytorch.helpers import assert_same_bits, captured, side_stream, states_of
from pytorch.layer_ways import (
    DROPS,
    HIDDEN,
    LAYER,
    LENGTH,
    RECIPE_NAMES,
    assert_same_error,
    assert_ways_agree,
    assert_whole,
    backward,
    both_ways,
    by_modules,
    dtype_of,
    gradients,
    inputs_of,
    make_attention,
    make_layer,
    region,
    states,
    train,
    watched,
)
from thinning import pairs
from tols import BF16

import transformer_engine.pytorch as te

# ---- inputs --------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:, :1].expand(-1, 2, -1),
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[x.numel() // 2 :][
        : x.numel()
    ].view_as(x),
    "permuted": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "computed": lambda x: x * 1.5,
    "parameter": lambda x: torch.nn.Parameter(x.detach().clone()),
}


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_input(device, layout, recipe):
    layer = make_layer(device, dtype_of(device, recipe), layer_type="decoder", **DROPS)

    def run(layer):
        x, source = states(layer), states(layer)
        with region(recipe):
            given = LAYOUTS[layout](x), LAYOUTS[layout](source)
            out = layer(given[0], encoder_output=given[1])
        backward([out])
        leaves = given if layout == "parameter" else (x, source)
        grads = [leaf.grad for leaf in leaves]
        return [out.detach(), *grads, *(p.grad for p in layer.parameters())]

    both_ways(layer, run, whole=layout != "parameter")  # a subclass of torch.Tensor


def test_layouts_of_the_gradient(device):
    layer = make_layer(device, dtype_of(device), **DROPS)

    def run(layer):
        x, found = states(layer), []
        for grad in (torch.ones((), device=device).expand(LENGTH, 2, HIDDEN),
                     torch.randn(HIDDEN, 2, LENGTH, device=device).permute(2, 1, 0)):  # fmt: skip
            out = layer(x)
            found += torch.autograd.grad(out, [x, *layer.parameters()], grad.to(out.dtype))
        return found

    both_ways(layer, run)


def test_one_tensor_as_both_inputs(device):
    """Its gradient is the sum of both, where modules add four in an order of their own."""
    layer = make_layer(device, dtype_of(device), layer_type="decoder", **DROPS)
    x = states(layer)
    source = x.detach().clone().requires_grad_()
    seed, found = int(torch.randint(2**31, ())), []
    for given in (source, x):
        torch.manual_seed(seed)
        out = assert_whole(layer, hidden_states=x, encoder_output=given)
        found.append(gradients(layer, x, out))
    found[0][1] += source.grad
    assert_same_bits(*found)


FULL = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}


# A mask is an input of the attention node; a recipe is of the products.
@pairs(mask=FULL, kind=["encoder", "decoder", "attention"], recipe=[None, "delayed"])
def test_padding_without_lengths(device, kind, mask, recipe):
    """All sequences are of full length, in every way; the bits are those without padding."""
    names = ["self_attn_mask_type", "enc_dec_attn_mask_type"][: 1 + (kind == "decoder")]
    make = partial(make_layer, layer_type=kind)
    if kind == "attention":
        names, make = ["attn_mask_type"], make_attention
    layer = make(device, dtype_of(device, recipe))
    given = inputs_of(layer, **dict.fromkeys(names, mask))
    ours = assert_ways_agree(layer, given, recipe=recipe)
    plain = {**given, **dict.fromkeys(names, FULL[mask])}
    for mine, theirs in zip(ours, train(layer, plain, recipe), strict=True):
        assert_same_bits(mine["outputs"], theirs["outputs"])
        for name in ("inputs", "parameters"):
            assert_same_bits([*mine[name].values()], [*theirs[name].values()])
    packed = te.MultiheadAttention(HIDDEN, 4, device=device, qkv_format="thd")
    with pytest.raises(ValueError, match="qkv_format='thd', which needs cu_seqlens_q"):
        packed(states(packed), attn_mask_type=mask)


def test_padding_without_lengths_compiled(device):
    layer = make_layer(device, dtype_of(device))
    x = states(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for function in (layer, compiled):
        for mask in ("padding_causal", "causal"):
            out = function(x, self_attn_mask_type=mask)
            found.append(gradients(layer, x, out))
    for each in found[1:]:
        assert_same_bits(each, found[0])


def wrong_inputs(layer, device):
    """Calls that are refused, by name."""
    x = states(layer).detach()
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool, device=device)
    angles = te.RotaryPositionEmbedding(8).to(device)(LENGTH)
    bias = {"core_attention_bias_type": "post_scale_bias"}
    padding = {"self_attn_mask_type": "padding"}
    return {
        "no batch": lambda: layer(x[:, 0]),
        "four dims": lambda: layer(x[None]),
        "one dim": lambda: layer(x[0, 0]),
        "features": lambda: layer(x[..., :-1]),
        "dtype": lambda: layer(x.to(torch.complex64)),
        "integers": lambda: layer(x.long()),
        "list": lambda: layer([x]),
        "mask dtype": lambda: layer(x, mask.float(), **padding),
        "mask shape": lambda: layer(x, mask[:1], **padding),
        "no mask": lambda: layer(x, self_attn_mask_type="arbitrary"),
        "arbitrary shape": lambda: layer(x, mask[..., :-1], self_attn_mask_type="arbitrary"),
        "mask type": lambda: layer(x, self_attn_mask_type="diagonal"),
        "lengths": lambda: layer(x, cu_seqlens_q=torch.zeros(9), **padding),
        "window": lambda: layer(x, window_size=(2, 2)),
        "no bias": lambda: layer(x, **bias),
        "bias shape": lambda: layer(x, core_attention_bias=x, **bias),
        "bias type": lambda: layer(x, core_attention_bias_type="after"),
        "slopes": lambda: layer(
            x, core_attention_bias_type="alibi", alibi_slopes=torch.ones(3, device=device)
        ),
        "angles dims": lambda: layer(x, rotary_pos_emb=angles[0]),
        "angles short": lambda: layer(x, rotary_pos_emb=angles[:-1]),
        "angles wide": lambda: layer(x, rotary_pos_emb=torch.cat([angles, angles], -1)),
        "angles odd": lambda: layer(x, rotary_pos_emb=angles[..., :-1]),
        "angles three": lambda: layer(x, rotary_pos_emb=(angles,) * 3),
        "inference": lambda: layer(x, inference_params={}),
        "source": lambda: layer(x, encoder_output=x),
    }


NAMES = ("no batch", "four dims", "one dim", "features", "dtype", "integers", "list", "mask dtype",
         "mask shape", "no mask", "arbitrary shape", "mask type", "lengths", "window", "no bias",
         "bias shape", "bias type", "slopes", "angles dims", "angles short", "angles wide",
         "angles odd", "angles three", "inference", "source")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_refused_calls(device, name):
    layer = make_layer(device, dtype_of(device))
    assert_same_error(layer, wrong_inputs(layer, device)[name])


@pytest.mark.parametrize("name", ["missing", "batch", "dtype", "features", "dims", "type", "list"])
def test_refused_sources(device, name):
    layer = make_layer(device, dtype_of(device), layer_type="decoder")
    x = states(layer).detach()
    wrong = {
        "missing": None,
        "batch": x[:, :1],
        "dtype": x.double(),
        "features": x[..., :-1],
        "dims": x[0],
        "type": x.long(),
        "list": [x],
    }[name]
    assert_same_error(layer, lambda: layer(x, encoder_output=wrong))


@pytest.mark.gpu
def test_tensors_of_two_devices():
    layer = make_layer("cuda", BF16, layer_type="decoder")
    x = states(layer).detach()
    assert_same_error(layer, lambda: layer(x.cpu(), encoder_output=x))
    assert_same_error(layer, lambda: layer(x, encoder_output=x.cpu()))


# ---- several layers and threads ------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_nested_layers(device, recipe):
    """The first one of a region updates the state, whichever way each of them runs."""
    dtype = dtype_of(device, recipe)
    last = make_layer(device, dtype)
    layers = torch.nn.Sequential(
        make_layer(device, dtype, **DROPS),
        torch.nn.Sequential(make_layer(device, dtype), torch.nn.Sequential(last)),
        te.Linear(HIDDEN, HIDDEN, params_dtype=dtype, device=device),
    )
    wide = states(layers[0])

    def run(layers):
        found = []
        x, other = (wide.detach().clone().requires_grad_() for _ in range(2))
        for _ in range(3):
            other.grad = None
            with region(recipe):
                out = layers(x)
                second = layers(other)
            found += [*gradients(layers, x, out + second), other.grad]
        return found

    both_ways(layers, run)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_two_threads_with_one_layer(device, recipe):
    """Without dropout, whose numbers would depend on who draws first."""
    layer = make_layer(device, dtype_of(device, recipe))
    inputs = [states(layer, length=n).detach() for n in (3, 5, 6, 7)]

    def run(x):
        x = x.clone().requires_grad_()
        with region(recipe):
            out = layer(x)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), [x, *layer.parameters()])]

    with by_modules():
        expected = [run(x) for x in inputs]
    found, errors = {}, []

    def work(number):
        try:
            for _ in range(10):
                found[number] = run(inputs[number])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    with watched() as taken:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors and set(taken) == {(LAYER, True)}
    assert_same_bits([found[i] for i in range(len(inputs))], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_captured_graph(recipe):
    """Replayed, forward and backward give the bits of an eager step of the modules."""
    layer = make_layer("cuda", BF16)
    eager = copy.deepcopy(layer)
    static = states(layer)

    def step(layer, x):
        with region(recipe):
            out = layer(x)
        return out, torch.autograd.grad(out.float().sum(), [x, *layer.parameters()])

    with side_stream():
        for _ in range(3):
            step(layer, static)
    with watched() as found:
        graph, results = captured(lambda: step(layer, static))
    assert found == [(LAYER, True)]
    graph.replay()
    replayed = [results[0].detach().clone(), *(grad.clone() for grad in results[1])]
    state = states_of(layer)
    te.reset()
    twin = static.detach().clone().requires_grad_()
    with by_modules():
        for _ in range(4):  # as many as have run of the other one: capturing runs nothing
            out, grads = step(eager, twin)
    assert_same_bits(replayed, [out.detach(), *grads])
    assert_same_bits(states_of(eager), state)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_many_shapes(device, recipe):
    """Of sequences and of batches, back and forth."""
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)

    def run(layer):
        found = []
        for length, batch in [(6, 2), (1, 2), (17, 3), (6, 2), (33, 1), (6, 2)]:
            x = states(layer, length, batch)
            with region(recipe):
                out = layer(x)
            found += gradients(layer, x, out)
        return found

    both_ways(layer, run)


def test_ways_by_turns(device):
    """One layer that is called in both ways shares its state between them."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)

    def run(layer):
        found = []
        for step in range(6):
            with by_modules() if step % 2 else contextlib.nullcontext():
                found += train(layer, given, "delayed", 1)
        return found

    both_ways(layer, run, None)
    assert_ways_agree(layer, given, recipe="delayed")
