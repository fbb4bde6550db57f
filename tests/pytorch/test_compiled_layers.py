# SPDX-License-Identifier: Apache-2.0
"""Compiled layers: one operator per direction, the bits of eager code, and graphs no more than due.

What a layer is in a graph of `torch.compile` is counted in the graphs that AOT autograd hands on.
"""

import contextlib
import copy

import pytest
import torch
import torch._dynamo.utils
from functorch.compile import make_boxed_func
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import (
    BATCH,
    FUSED,
    HEADS,
    HIDDEN,
    LENGTH,
    make_attention,
    make_layer,
    states,
)
from tols import BF16, F32
from torch._dynamo.backends.common import aot_autograd

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "measured": lambda: DelayedScaling(amax_history_len=2, measure_first=True),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "wide": lambda: Float8CurrentScaling(backward_override="high_precision"),
}
STEPS = 3


@pytest.fixture(autouse=True)
def _fresh_compiler():
    te.reset()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def region(recipe):
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


class Graphs:
    """A backend that runs graphs as they are, and lists the operators of this library in them."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: self._note(graph, self.forward),
            bw_compiler=lambda graph, _: self._note(graph, self.backward),
        )

    def compile(self, function, **options):
        return torch.compile(function, fullgraph=True, backend=self.backend, **options)

    @staticmethod
    def _note(graph, found):
        names = []
        for module in graph.modules():
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                name = str(
                    node.args[0] if "auto_functionalized" in str(node.target) else node.target
                )
                if name.startswith("transformer_engine."):
                    names.append(name.split(".")[1].rstrip("_0123456789"))
        found.append(sorted(names))
        return make_boxed_func(graph.forward)

    def plans(self):
        """(runs of plans in each forward, in each backward)."""
        runs = ("run", "run_with_state")
        return tuple(
            [sum(n in runs for n in one) for one in way] for way in (self.forward, self.backward)
        )


def unique_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def model_of(count, device="cpu", **options):
    layers = [make_layer(device, options.pop("dtype", BF16), **options) for _ in range(count)]
    return torch.nn.Sequential(*layers)


def train(model, forward, make_recipe, where="outside", lengths=(LENGTH,) * STEPS, **given):
    """Outputs, gradients and scaling state of a few steps."""
    found = []
    for step, length in enumerate(lengths):
        model.zero_grad()
        x = (states(model[0], length).detach() * 2.0**step).requires_grad_()
        with contextlib.nullcontext() if where == "inside" else region(make_recipe()):
            out = forward(x, **given)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    return found, states_of(model)


def both_ways(model, compiled, make_recipe, where="outside", call=None, **given):
    """`train` in eager mode and compiled; `compiled` makes a function of a model.

    `call` are further arguments of the one layer.
    """
    results, given = [], {**given, **(call or {})}
    for make in (lambda own: own[0] if call else own, compiled):
        own = copy.deepcopy(model)
        te.reset()
        with same_draws("cpu"):
            results.append(train(own, make(own), make_recipe, where, **given))
    return results


def entered(make_recipe):
    """Make functions that enter a region themselves."""
    recipe = make_recipe()

    def make(model):
        def function(x):
            with region(recipe):
                return model(x)

        return function

    return make


# ---- one operator per direction ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_operator_for_a_layer(recipe, where):
    graphs, make_recipe = Graphs(), RECIPES[recipe]
    model = model_of(2, **(FUSED if where == "inside" else {}))
    inside = entered(make_recipe) if where == "inside" else lambda own: own
    results = []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        te.reset()
        function = inside(own)
        with same_draws("cpu"):
            results.append(
                train(own, graphs.compile(function) if compiled else function, make_recipe, where)
            )
    assert_same_bits(*results)
    assert set(graphs.plans()[0]) == set(graphs.plans()[1]) == {2}


KINDS = {
    "dropout": {"hidden_dropout": 0.3, "attention_dropout": 0.2, "drop_path_rate": 0.25},
    "swiglu": {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, **FUSED},
    "parallel": {"parallel_attention_mlp": True},
    "groups": {"num_gqa_groups": 2, "window_size": (3, 0)},
    "post-layernorm": {"apply_residual_connection_post_layernorm": True, "hidden_dropout": 0.1},
    "output-layernorm": {"output_layernorm": True},
    "qk-norm": {"qk_norm_type": "RMSNorm", "attn_input_format": "bshd"},
    "named": {"name": "block"},
    "alibi": {},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "softcap": {"softcap": 8.0},
}


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind, recipe):
    graphs, given = Graphs(), {}
    model = model_of(1, **KINDS[kind])
    if kind == "alibi":
        given["core_attention_bias_type"] = "alibi"
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(model)
        te.reset()
        with same_draws("cpu"):
            results.append(train(own, compile(own[0]), RECIPES[recipe], **given))
    assert_same_bits(*results)
    assert graphs.plans()[0][0] == 1 + (kind == "output-layernorm")
    assert unique_graphs() == 1


# ---- other layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
@pytest.mark.parametrize("options", [{}, {"return_bias": True, "input_layernorm": True}])
def test_attention_by_itself(options, recipe):
    graphs, module = Graphs(), make_attention("cpu", BF16, **options)
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(module)
        te.reset()
        run = compile(own)

        def forward(x, run=run):
            out = run(x)
            return out[0] + out[1] if isinstance(out, tuple) else out

        with same_draws("cpu"):
            results.append(train(torch.nn.Sequential(own), forward, RECIPES[recipe]))
    assert_same_bits(*results)
    assert graphs.plans() == ([1], [1])


class Stack(te.PlannedModule):
    """A module of modules, with a setting and an argument of its own."""

    def __init__(self, twice=False):
        super().__init__()
        self.twice = twice
        self.attention = make_attention("cpu", BF16, input_layernorm=True)
        self.mlp = te.LayerNormMLP(HIDDEN, 64, params_dtype=BF16, device="cpu")

    def emit(self, nodes, x, scale=1):
        made = nodes.add(nodes.run(self.attention, x), nodes.run(self.mlp, x))
        return nodes.add(made, nodes.run(self.mlp, made) if self.twice or scale > 1 else x)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_modules_of_a_program(recipe):
    graphs, module = Graphs(), Stack()
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(module)
        te.reset()
        run, found = compile(own), []
        for change in (dict(), dict(scale=2), dict(scale=1)):
            for own.twice in (False, True):
                with region(RECIPES[recipe]()):
                    x = torch.ones(LENGTH, BATCH, HIDDEN, dtype=BF16, requires_grad=True)
                    out = run(x, **change)
                out.sum().backward()
                found += [out.detach(), x.grad]
        results.append(found)
    assert_same_bits(*results)
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}


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

    with torch._dynamo.config.patch(recompile_limit=64):
        before = assert_same_step()
        for name in GROUPS[group]:
            undo = [CHANGES[name](own) for own in (twin, layer)]
            after = assert_same_step()
            assert after == before + (name not in STAYS), name
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
    *("cp_comm_type", "layer_number", "sequence_parallel"),
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
    """What no operator holds; the bits are the same."""
    layer = make_layer("cpu", BF16, **FUSED)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
    for name, around in {
        "attention in FP8": lambda: te.autocast(recipe=DelayedScaling(fp8_dpa=True)),
    }.items():
        graphs = Graphs()
        torch._dynamo.reset()
        te.reset()
        with around():
            expected = layer(x)
            te.reset()
            assert_same_bits(graphs.compile(layer)(x), expected, name)
        assert graphs.plans()[0][0] > 1, name


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
    """The backward has the operators of the forward once more."""
    graphs, model = Graphs(), model_of(1, hidden_dropout=0.3, **FUSED)

    def checkpointed(own):
        def function(x):
            return te.checkpoint(own[0], x, use_reentrant=False)

        return graphs.compile(function)

    results = both_ways(model, checkpointed, RECIPES["none"])
    assert_same_bits(*results)
    assert graphs.plans() == ([1], [2])


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
