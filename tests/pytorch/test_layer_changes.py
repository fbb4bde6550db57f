# SPDX-License-Identifier: Apache-2.0
"""What is done to a layer between two calls counts from the next one on, whatever calls it keeps.

Steps before a change, after it and, where it can be undone, after that give the bits of a layer
that calls its modules; which way each of them ran is asserted.
"""

import contextlib

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.layer_ways import (
    HIDDEN,
    LENGTH,
    assert_counts,
    dtype_of,
    inputs_of,
    make_attention,
    make_layer,
    set_of,
)
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.module.layer_call import LayerRunner

DROPS = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("self_attention.layernorm_qkv.eps", 0.5),
        ("layernorm_mlp.eps", 0.5),
        ("self_attention.layernorm_qkv.zero_centered_gamma", True),
        ("layernorm_mlp.zero_centered_gamma", True),
        ("self_attention.core_attention.softmax_scale", 0.9),
        ("self_attention.core_attention.attn_mask_type", "no_mask"),
        ("self_attention.core_attention.attention_dropout", 0.5),
        ("self_attention.core_attention.attention_dropout", 0.0),
        ("hidden_dropout", 0.0),
        ("hidden_dropout", 0.6),
        ("drop_path_rate", 0.5),
        ("name", "another"),
        ("self_attention.name", "another"),
        ("self_attention.proj.name", "another"),
        ("layernorm_mlp.save_original_input", True),
        ("layernorm_mlp.return_bias", False),
        ("self_attention.proj.return_bias", False),
    ],
)
def test_settings(device, path, value, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)
    assert_counts(layer, set_of(path, value), True, recipe=recipe)


@pytest.mark.parametrize("window", [(2, 0), [2, 0]], ids=["pair", "list"])
def test_a_window_that_is_set(device, window):
    layer = make_layer(device, dtype_of(device))
    change = set_of("self_attention.core_attention.window_size", window)
    undo = lambda layer, _: set_of("self_attention.core_attention.window_size", None)(layer)  # noqa: E731
    assert_counts(layer, change, True, undo=undo)


def test_hidden_dropout_of_a_layer_that_was_made_without(device):
    """Its biases stay where they are added."""
    layer = make_layer(device, dtype_of(device))
    assert_counts(layer, set_of("hidden_dropout", 0.4), True)


@pytest.mark.parametrize("name", ["qkv_weight_interleaved", "rotary_pos_interleaved"])
def test_order_of_projections_and_of_channels(device, name):
    layer = make_attention(device, dtype_of(device), fuse_qkv_params=True)
    angles = te.RotaryPositionEmbedding(8).to(device)(LENGTH)
    given = inputs_of(layer, rotary_pos_emb=angles)
    assert_counts(layer, set_of(name, not getattr(layer, name)), True, given=given)


def test_a_layer_that_returns_more(device):
    layer = make_attention(device, dtype_of(device), return_bias=True)
    assert_counts(layer, lambda layer: layer.proj.add_bias(), True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("self_attention.proj", "delay_wgrad_compute"),
        ("layernorm_mlp", "delay_wgrad_compute"),
        ("layernorm_mlp", "checkpoint"),
    ],
)
def test_settings_that_call_the_modules(device, path, name):
    """A module that puts its weight gradients off, or repeats its forward, is not joined."""
    layer = make_layer(device, dtype_of(device))
    assert_counts(
        layer,
        set_of(f"{path}.{name}", True),
        False,
        undo=lambda layer, _: set_of(f"{path}.{name}", False)(layer),
    )


@pytest.mark.parametrize("part", ["", "self_attention", "self_attention.core_attention",
                                  "layernorm_mlp"])  # fmt: skip
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_training_mode_of_the_layer_or_of_a_part(device, part, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)
    assert_counts(
        layer,
        lambda layer: layer.get_submodule(part).eval() and None,
        True,
        undo=lambda layer, _: layer.get_submodule(part).train(),
        recipe=recipe,
    )


def test_a_tracker_that_is_set(device, monkeypatch):
    if device == "cpu":  # the tracker swaps the CPU's state where there is no CUDA device
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def change(layer):
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 77)
        layer.self_attention.core_attention._get_tracker = lambda: tracker

    def undo(layer, _):
        layer.self_attention.core_attention._get_tracker = None

    assert_counts(make_layer(device, dtype_of(device), **DROPS), change, True, undo=undo)


# ---- hooks and overrides -------------------------------------------------------------------------

PARTS = [
    "self_attention",
    "self_attention.layernorm_qkv",
    "self_attention.core_attention",
    "self_attention.proj",
    "layernorm_mlp",
]
HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("part", PARTS)
def test_hooks_of_a_part(device, part, register):
    seen = []

    def change(layer):
        return getattr(layer.get_submodule(part), register)(lambda *_: seen.append(part))

    layer = make_layer(device, dtype_of(device))
    assert_counts(layer, change, False, undo=lambda _, handle: handle.remove())
    assert len(seen) == 4  # two steps of each of two ways


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_all_modules(device, register):
    seen, handles = [], []
    add = getattr(torch_module, register.replace("register_", "register_module_"))

    def change(_):
        handles.append(add(lambda module, *_: seen.append(type(module))))

    layer = make_layer(device, dtype_of(device))
    try:
        assert_counts(layer, change, False, undo=lambda *_: handles[-1].remove())
    finally:
        for handle in handles:
            handle.remove()
    assert {te.TransformerLayer, te.LayerNormLinear, te.LayerNormMLP, te.Linear} <= set(seen)


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_the_layer_itself(device, register):
    """They are run by its call, around what it does."""
    seen = []

    def change(layer):
        return getattr(layer, register)(lambda *_: seen.append(1))

    layer = make_layer(device, dtype_of(device))
    assert_counts(layer, change, True, undo=lambda _, handle: handle.remove())
    assert len(seen) == 4


def test_hooks_of_parameters(device):
    """Autograd runs them, whoever computes the gradients."""
    seen = []

    def change(layer):
        for parameter in layer.parameters():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(1))

    layer = make_layer(device, dtype_of(device))
    assert_counts(layer, change, True)
    assert len(seen) == 4 * len(list(layer.parameters()))


@pytest.mark.parametrize("part", PARTS)
def test_forward_of_an_instance(device, part):
    def change(layer):
        module = layer.get_submodule(part)
        real = module.forward
        module.forward = lambda *args, **kwargs: _doubled(real(*args, **kwargs))
        return module

    def undo(_, module):
        del module.forward

    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


def _doubled(out):
    return out * 2


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP,
                                  te.DotProductAttention, te.MultiheadAttention])  # fmt: skip
def test_forward_of_a_class(device, kind):
    real = kind.forward

    def change(_):
        kind.forward = lambda self, *args, **kwargs: _doubled(real(self, *args, **kwargs))

    def undo(*_):
        kind.forward = real

    with _restored(kind, real):
        assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


@contextlib.contextmanager
def _restored(kind, forward):
    try:
        yield
    finally:
        kind.forward = forward


@pytest.mark.parametrize("part", PARTS)
def test_another_class(device, part):
    """A subclass may do anything."""

    def change(layer):
        module = layer.get_submodule(part)
        kind = type(module)
        module.__class__ = type(
            "Mine", (kind,), {"forward": lambda self, *a: kind.forward(self, *a)}
        )
        return module, kind

    def undo(_, changed):
        module, kind = changed
        module.__class__ = kind

    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_part(device):
    def change(layer):
        layer.layernorm_mlp.compile(backend="eager")

    def undo(layer, _):
        layer.layernorm_mlp._compiled_call_impl = None

    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


class Double(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize(("part", "name"), [("self_attention.proj", "weight"),
                                            ("layernorm_mlp", "fc1_weight")])  # fmt: skip
def test_parametrization(device, part, name, recipe):
    def change(layer):
        parametrize.register_parametrization(layer.get_submodule(part), name, Double())

    def undo(layer, _):
        parametrize.remove_parametrizations(layer.get_submodule(part), name)

    layer = make_layer(device, dtype_of(device, recipe))
    assert_counts(layer, change, False, undo=undo, recipe=recipe)


def test_pruning(device):
    def change(layer):
        prune.l1_unstructured(layer.self_attention.proj, "weight", 0.5)

    def undo(layer, _):
        prune.remove(layer.self_attention.proj, "weight")

    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


class LowRank(torch.nn.Module):
    """An adapter around a frozen linear module."""

    def __init__(self, base, features):
        super().__init__()
        self.base = base.requires_grad_(False)
        weight = next(base.parameters())
        self.down = torch.nn.Linear(HIDDEN, 4, False, weight.device, weight.dtype)
        self.up = torch.nn.Linear(4, features, False, weight.device, weight.dtype)

    def forward(self, x, *given):
        return self.base(x, *given) + self.up(self.down(x))


@pytest.mark.parametrize("drops", [{}, DROPS], ids=["", "dropped"])
@pytest.mark.parametrize("part", ["layernorm_qkv", "proj"])
def test_adapters(device, part, drops):
    """Wrapped, and unwrapped again; a wrapped module adds the bias that it had returned."""

    def change(layer):
        base = getattr(layer.self_attention, part)
        setattr(layer.self_attention, part, LowRank(base, base.out_features))

    def undo(layer, _):
        setattr(layer.self_attention, part, getattr(layer.self_attention, part).base)

    assert_counts(make_layer(device, dtype_of(device), **drops), change, False, undo=undo)


def test_an_attention_of_another_kind(device):
    class Mine(torch.nn.Module):
        def forward(self, x, *given):
            return x * 0.5

    def change(layer):
        real, layer.self_attention = layer.self_attention, Mine()
        return real

    def undo(layer, real):
        layer.self_attention = real

    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_replaced(device, part):
    """By another one of its class, with parameters and state of its own."""

    def change(layer):
        other = make_layer(device, next(layer.parameters()).dtype, **DROPS)
        path, _, name = part.rpartition(".")
        setattr(layer.get_submodule(path), name, other.get_submodule(part))

    layer = make_layer(device, dtype_of(device, "delayed"), **DROPS)
    assert_counts(layer, change, True, recipe="delayed")


def test_stages_of_a_part(device):
    """A Python function in the place of a stage, and one that looks on."""

    def change(layer):
        layer.layernorm_mlp.observe_stages(lambda stage, *_: seen.append(stage.name))

    def undo(layer, _):
        layer.layernorm_mlp.observe_stages(None)

    seen = []
    assert_counts(make_layer(device, dtype_of(device)), change, False, undo=undo)
    assert seen


def test_a_hook_does_not_make_a_layer_look_at_its_modules_anew(device, monkeypatch):
    """Nor does it hide what changes: the layer runs as one plan again once the hook is gone."""
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = te.TransformerLayer(32, 64, 2, **off, device=device)
    x = torch.randn(4, 2, 32, device=device)
    expected, made = layer(x), []
    real = LayerRunner._find_parents
    monkeypatch.setattr(LayerRunner, "_find_parents", lambda *a: (made.append(a), real(*a))[1])
    seen = []
    hook = layer.self_attention.proj.register_forward_hook(lambda *a: seen.append(a))
    for _ in range(4):
        assert_same_bits(layer(x), expected)
    assert len(seen) == 4 and len(made) <= 2  # of the layer, and of its attention
    hook.remove()
    assert_same_bits(layer(x), expected)
    assert len(seen) == 4 and LayerRunner.of(layer) is not None
    parametrize.register_parametrization(layer.self_attention.proj, "weight", torch.nn.Identity())
    assert_same_bits(layer(x), expected)
    parametrize.remove_parametrizations(layer.self_attention.proj, "weight")
    assert_same_bits(layer(x), expected)
    assert LayerRunner.of(layer) is not None
