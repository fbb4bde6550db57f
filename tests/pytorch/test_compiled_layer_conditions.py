# SPDX-License-Identifier: Apache-2.0
"""What the graph of a compiled layer depends on: a change counts from the next call on."""

import copy

import pytest
import torch
import torch._dynamo.utils
from pytorch.compiled_layers import (
    RECIPES,
    Graphs,
    both_ways,
    model_of,
    region,
    repeats_functions_of_autograd,
    unique_graphs,
    watches_frozen_parameters,
)
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import (
    BATCH,
    FUSED,
    HEADS,
    HIDDEN,
    LENGTH,
    make_layer,
    states,
)
from tols import BF16, F32

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---- what a graph depends on ---------------------------------------------------------------------


def setting(path, name, value):
    """A change of an attribute of a module, and what takes it back."""

    def change(layer):
        module = layer.get_submodule(path)
        before = getattr(module, name)
        setattr(module, name, value(module) if callable(value) else value)
        return lambda: setattr(module, name, before)

    return change


def frozen(names):
    def change(layer):
        found = [p for name, p in layer.named_parameters() if names in name and p.requires_grad]
        for parameter in found:
            parameter.requires_grad_(False)
        return lambda: [parameter.requires_grad_(True) for parameter in found]

    return change


def evaluation(layer):
    layer.eval()
    return layer.train


def qk_norms(layer):
    attention = layer.self_attention
    for name in ("q_norm", "k_norm"):
        norm = te.RMSNorm(HIDDEN // HEADS, params_dtype=BF16, device="cpu")
        setattr(attention, name, norm)

    def undo():
        attention.q_norm = attention.k_norm = None

    return undo


def other_activation(mlp):
    other = te.LayerNormMLP(HIDDEN, 64, activation="relu", params_dtype=BF16, device="cpu")
    return other.activation_spec


class Adapter(torch.nn.Module):
    """Another package's module around one of ours."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *given):
        return self.inner(x, *given) * 2.0


CHANGES = {
    "hidden dropout": setting("", "hidden_dropout", 0.5),
    "no hidden dropout": setting("", "hidden_dropout", 0.0),
    "drop path": setting("", "drop_path_rate", 0.5),
    "attention dropout": setting("self_attention.core_attention", "attention_dropout", 0.4),
    "softmax scale": setting("self_attention.core_attention", "softmax_scale", 0.75),
    "window": setting("self_attention.core_attention", "window_size", (2, 0)),
    "mask": setting("self_attention.core_attention", "attn_mask_type", "no_mask"),
    "softcap": setting("self_attention.core_attention", "softcap", 2.0),
    "core in evaluation": setting("self_attention.core_attention", "training", False),
    "layer in evaluation": setting("", "training", False),
    "evaluation": evaluation,
    "eps": setting("layernorm_mlp", "eps", 0.5),
    "gamma": setting("self_attention.layernorm_qkv", "zero_centered_gamma", True),
    "activation": setting("layernorm_mlp", "activation_spec", other_activation),
    "checkpoint": setting("layernorm_mlp", "checkpoint", True),
    "bias": setting("self_attention.layernorm_qkv", "apply_bias", False),
    "input kept": setting("self_attention.proj", "save_original_input", True),
    "frozen weight": frozen("fc1_weight"),
    "frozen norm": frozen("layer_norm"),
    "all frozen": frozen(""),
    "other module": setting("self_attention", "proj", lambda m: Adapter(m.proj)),
    "other MLP": setting("", "layernorm_mlp", lambda m: Adapter(m.layernorm_mlp)),
    "qk norms": qk_norms,
    "parameter": setting("layernorm_mlp", "fc2_bias", lambda m: torch.nn.Parameter(m.fc2_bias + 1)),
    "wider parameter": setting(
        "self_attention.proj", "bias", lambda m: torch.nn.Parameter(m.bias.float())
    ),
}


GROUPS = [list(CHANGES)[i::5] for i in range(5)]
"""Changes that one compiled layer goes through, to compile it as it was but once."""
STAYS = ("parameter",)
"""No other graph: only values change."""
FREEZES = ("frozen weight", "frozen norm", "all frozen")
"""Conditions of graphs that torch adds itself, from version 2.12 or 2.13 on."""
LEAVES_TRACES = ("other module", "other MLP", "qk norms")
"""What is taken back is not as it was: a bias is added by its module from then on, say."""


@pytest.mark.parametrize(
    ("group", "recipe"),
    [*((i, "none") for i in range(len(GROUPS))), (0, "delayed"), (1, "current")],
)
def test_a_change_counts_from_the_next_call_on(group, recipe):
    """And what was before it comes back without another graph."""
    graphs = Graphs()
    layer = make_layer("cpu", BF16, hidden_dropout=0.2, **FUSED)
    twin, x = copy.deepcopy(layer), torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    compiled = graphs.compile(layer)
    made = RECIPES[recipe]()

    def assert_same_step():
        seed, results = int(torch.randint(2**31, ())), []
        for own, run in ((twin, twin), (layer, compiled)):
            torch.manual_seed(seed)
            own.zero_grad()
            given = x.clone().requires_grad_()
            with region(made):
                out = run(given)
            if out.requires_grad:
                out.square().sum().backward()
            results.append([out.detach(), given.grad, *(p.grad for p in own.parameters())])
        assert_same_bits(*results)
        return unique_graphs()

    stays = (*STAYS, *(() if watches_frozen_parameters() else FREEZES))
    with torch._dynamo.config.patch(recompile_limit=64):
        before = assert_same_step()
        for name in GROUPS[group]:
            undo = [CHANGES[name](own) for own in (twin, layer)]
            after = assert_same_step()
            assert after == before + (name not in stays), name
            for one in undo:
                one()
            before = assert_same_step()
            assert before == after or name in LEAVES_TRACES, name
    assert_same_bits(states_of(twin), states_of(layer))
    assert graphs.plans()[0][0] == 1


def test_hooks_of_submodules_are_called():
    """Those that there are when a graph is made; others where torch is told to look for them."""
    layer = make_layer("cpu", BF16, **FUSED)
    graphs, x = Graphs(), torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    expected = layer(x)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        compiled = graphs.compile(layer)
        for _ in range(3):
            assert_same_bits(compiled(x), expected)
            hook = layer.layernorm_mlp.register_forward_hook(lambda module, given, out: out * 2)
            assert_same_bits(compiled(x), layer(x))
            assert not torch.equal(compiled(x), expected)
            hook.remove()
    assert unique_graphs() == 2 and graphs.plans()[0] == [1, 2]


def test_recipes_change():
    """Their fields count, not the objects."""
    graphs, layer = Graphs(), make_layer("cpu", BF16, **FUSED)
    twin, x = copy.deepcopy(layer), torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    recipes = [
        lambda: None,
        lambda: DelayedScaling(amax_history_len=4),
        Float8CurrentScaling,
        lambda: Float8CurrentScaling(use_power_2_scales=True),
    ]
    results, counts = [], []
    for own, run in ((twin, twin), (layer, graphs.compile(layer))):
        te.reset()
        found = []
        for _ in range(4):
            for make in recipes:
                own.zero_grad()
                with region(make()):
                    out = run(x)
                out.square().sum().backward()
                found.append([out.detach(), *(p.grad for p in own.parameters())])
            counts.append(unique_graphs())
        results.append([found, states_of(own)])
    assert_same_bits(*results)
    assert counts[4:] == [len(recipes)] * 4
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_any_length_has_one_graph(recipe):
    graphs, model = Graphs(), model_of(2)
    lengths = (6, 9, 17, 5)
    results = both_ways(model, graphs.compile, RECIPES[recipe], lengths=lengths)
    assert_same_bits(*results)
    assert unique_graphs() == 2  # one length, any length
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dynamic = both_ways(
        model, lambda own: graphs.compile(own, dynamic=True), RECIPES[recipe], lengths=lengths
    )
    assert_same_bits(*dynamic)
    assert unique_graphs() == 1
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {2}


def test_layers_of_one_kind_share_a_graph():
    """Layers that are compiled one by one, as large models are."""
    model = model_of(4)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    run = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend="aot_eager")
    for layer in model:
        assert_same_bits(run(layer, x), layer(x))
    assert unique_graphs() == 1
    model[2].hidden_dropout = 0.5
    with same_draws("cpu"):
        expected = model[2](x)
    assert_same_bits(run(model[2], x), expected)


OTHERS = [
    {"normalization": "RMSNorm", "qk_norm_type": "RMSNorm"},
    {"qk_norm_type": "LayerNorm"},
    {"bias": False},
    {"activation": "relu", "layernorm_epsilon": 0.25},
    {"num_gqa_groups": 2},
    {"zero_centered_gamma": True},
    {"softmax_type": "off-by-one"},
    {"apply_residual_connection_post_layernorm": True},
]
"""Options of layers whose parameters may look alike."""


def test_layers_of_other_kinds_do_not():
    """In one function, whichever comes first."""
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    layers = [make_layer("cpu", BF16, **FUSED, **options) for options in [{}, *OTHERS]]
    run = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=64):
        for ordered in (layers, layers[::-1]):
            for layer in ordered:
                assert_same_bits(run(layer, x), layer(x))
    assert unique_graphs() == len(layers)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        for layer in layers[::-1]:
            assert_same_bits(run(layer, x), layer(x))


NO_MATTER = {
    *("tp_group", "parallel_mode", "ub_name", "cp_group", "cp_stream", "cp_global_ranks"),
    *("cp_comm_type", "cp_rank", "layer_number", "sequence_parallel", "overlaps"),
    "tp_size",  # modules inside have it, and never another one
    *("hidden_size", "ffn_hidden_size", "num_attention_heads"),  # of a layer: its modules have them
    *("layer_type", "output_layernorm"),  # the forward reads them
    *(
        "self_attn_mask_type",
        "enc_dec_attn_mask_type",
        "attn_mask_type",
        "window_size",
    ),  # the core's
    *("attention_type", "normalization", "activation", "elementwise_affine"),  # others say the same
    *("training", "name"),  # of what drops nothing, and has no label
}


def test_every_setting_is_one_of_the_graph():
    """Of each module of a layer: it is read by `_READ_BY_PLANS`, or plans do not depend on it."""
    options = {"qk_norm_type": "RMSNorm", "layer_type": "decoder", "name": "block"}
    for module in make_layer("cpu", BF16, **options).modules():
        plain = bool, int, float, str, tuple, type(None)
        own = {name for name, value in module.__dict__.items() if isinstance(value, plain)}
        public = {name for name in own if not name.startswith("_")}
        assert public <= {*module._READ_BY_PLANS} | NO_MATTER, type(module)


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast_of_torch(where, recipe):
    """Parameters are converted in the graph; what changes between two calls counts."""
    graphs, model = Graphs(), model_of(1, dtype=F32, **FUSED)
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    x = torch.randn(LENGTH, BATCH, HIDDEN)

    def amp(on=True):
        return torch.autocast("cpu", torch.bfloat16, enabled=on)

    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(model)[0]
        te.reset()

        def inside(x, own=own):
            with amp():
                return own(x, rotary_pos_emb=angles)

        run = compile(
            inside if where == "inside" else lambda x, own=own: own(x, rotary_pos_emb=angles)
        )
        found = []
        for on in (True, False, True, True):
            own.zero_grad()
            given = x.clone().requires_grad_()
            with region(RECIPES[recipe]()), amp(on):
                out = run(given)
            out.square().sum().backward()
            found += [out.detach(), given.grad, *(p.grad for p in own.parameters())]
        results.append([found, states_of(own)])
    assert_same_bits(*results)
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}


def test_calls_by_modules():
    """What no operator of a layer holds, quantized pieces say; the bits are the same."""
    graphs, recipe = Graphs(), Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        layer = make_layer("cpu", BF16)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    with te.autocast(recipe=recipe):
        assert_same_bits(graphs.compile(layer)(x), layer(x))
    assert graphs.plans()[0][0] > 1


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_a_checkpoint_around_a_compiled_layer(recipe):
    """The repetition runs the operator that the forward ran, by its scales."""
    graphs, model = Graphs(), model_of(2, hidden_dropout=0.3, **FUSED)

    def checkpointed(own):
        run = graphs.compile(own)
        return lambda x: te.checkpoint(run, x, use_reentrant=False)

    results = both_ways(model, checkpointed, RECIPES[recipe])
    assert_same_bits(*results)
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {2}


def test_a_checkpoint_inside_of_a_graph():
    """The backward has the operators of the forward once more, where torch repeats such ones."""
    repeated = repeats_functions_of_autograd()
    graphs, model = Graphs(), model_of(1, hidden_dropout=0.3, **FUSED)

    def checkpointed(own):
        def function(x):
            return te.checkpoint(own[0], x, use_reentrant=False)

        return graphs.compile(function)

    results = both_ways(model, checkpointed, RECIPES["none"])
    assert_same_bits(*results)
    assert graphs.plans() == ([1], [1 + repeated])


def test_tensors_of_a_call():
    """Masks, angles, lengths and the source of a decoder are inputs of the one operator."""
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, :, :, LENGTH - 2 :] = True
    cases = {
        "rotary": ({}, {"rotary_pos_emb": angles}),
        "padding": ({"self_attn_mask_type": "padding_causal"}, {"attention_mask": mask}),
        "decoder": ({"layer_type": "decoder"}, {"encoder_output": states(make_layer("cpu", BF16))}),
    }
    for name, (options, given) in cases.items():
        torch._dynamo.reset()
        graphs, model = Graphs(), model_of(1, **FUSED, **options)
        compiled = lambda own, graphs=graphs: graphs.compile(own[0])  # noqa: E731
        results = both_ways(model, compiled, RECIPES["none"], call=given)
        assert_same_bits(*results, name)
        assert graphs.plans()[0] == [1], name


AFTER_ERRORS = {
    "linear": lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device="cpu"),
    "mlp": lambda: te.LayerNormMLP(HIDDEN, HIDDEN, params_dtype=BF16, device="cpu"),
    "attention": lambda: te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, params_dtype=BF16, device="cpu"
    ),
    "layer": lambda: make_layer("cpu", BF16),
}


# The compiler looks at the attribute of every input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", AFTER_ERRORS)
@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_right_calls_after_a_wrong_one(kind, recipe):
    """Without ``fullgraph`` torch goes on in eager mode: with its bits, and in no part of it."""
    module = AFTER_ERRORS[kind]()
    twin = copy.deepcopy(module)
    right = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    wrong = torch.randn(LENGTH, BATCH, HIDDEN + 16, dtype=BF16)
    results = []
    for own, run in ((twin, twin), (module, torch.compile(module, backend="aot_eager"))):
        te.reset()
        found = []
        for x in (right, wrong, right, right, wrong, right):
            own.zero_grad()
            given = x.clone().requires_grad_()
            with region(RECIPES[recipe]()):
                if x is wrong:
                    with pytest.raises(ValueError, match="expected"):
                        run(given)
                    continue
                out = run(given)
            out.square().sum().backward()
            found.append([out.detach(), given.grad, *(p.grad for p in own.parameters())])
        results.append([found, states_of(own)])
    assert_same_bits(*results)
