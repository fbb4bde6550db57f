# SPDX-License-Identifier: Apache-2.0
"""How linear modules are made: shapes, initial values, dtypes, devices, and wrong arguments."""

import contextlib

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import batch, count_of, gemms_of, outputs_of, step, weights_of
from pytorch.module_reference import ACTIVATIONS

import transformer_engine.pytorch as te

MODULES = [te.Linear, te.LayerNormLinear, te.LayerNormMLP]
modules = pytest.mark.parametrize("module", MODULES)
splitting = pytest.mark.parametrize("module", MODULES[:2])


def home():
    """Where modules are made that are told no device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_shapes(name):
    module = te.LayerNormMLP(48, 32, activation=name, device="cpu")
    gated = name.endswith("glu")
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert shapes == {
        "layer_norm_weight": (48,),
        "layer_norm_bias": (48,),
        "fc1_weight": (64 if gated else 32, 48),
        "fc1_bias": (64 if gated else 32,),
        "fc2_weight": (48, 32),
        "fc2_bias": (48,),
    }


@modules
def test_initial_values(device, module):
    made = module(256, 512, device=device)
    for name, parameter in made.named_parameters():
        if name not in weights_of(made):
            assert (parameter == float(name == "layer_norm_weight")).all()
            continue
        deviation = float(parameter.detach().double().std())
        # The sample deviation of n values is itself within 1/sqrt(2 n) of it; 6 times here.
        assert abs(deviation / 0.023 - 1) * (2 * parameter.numel()) ** 0.5 < 6


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (te.Linear, {}, {"weight": (48, 32)}),
        (te.Linear, {"parameters_split": ("a", "b")}, dict.fromkeys("ab", (24, 32))),
        (te.LayerNormLinear, {}, {"weight": (48, 32)}),
        (te.LayerNormLinear, {"parameters_split": ("a", "b")}, dict.fromkeys("ab", (24, 32))),
        (te.LayerNormMLP, {}, {"fc1_weight": (48, 32)}),
    ],
    ids=str,
)
def test_init_methods(device, module, options, expected):
    """Each is called once for each weight that is its own; biases begin at 0, gamma at 1."""
    shapes = []

    def constant(value):
        def init(weight):
            shapes.append(tuple(weight.shape))
            torch.nn.init.constant_(weight, value)

        return init

    values = [constant(2.0)]
    if module is te.LayerNormMLP:
        options = {**options, "output_layer_init_method": constant(3.0)}
        expected = {**expected, "fc2_weight": (32, 48)}
    made = module(32, 48, init_method=values[0], device=device, **options)
    assert shapes == list(expected.values())
    for name, parameter in made.named_parameters():
        if name in weights_of(made):
            value = 3.0 if name == "fc2_weight" else 2.0
        else:
            value = float(name == "layer_norm_weight")
        assert (parameter == value).all(), name


@modules
def test_rng_tracker(module):
    forks = []
    seed = int(torch.randint(2**31, ()))

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="default"):
            forks.append(name)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            yield
            torch.set_rng_state(state)

    named = {"rng_tracker_name": "model-parallel-rng"} if module is te.Linear else {}
    before = torch.get_rng_state()
    made = [
        module(32, 48, get_rng_state_tracker=Tracker, device="cpu", **options)
        for options in ({}, named)
    ]
    assert_same_bits(torch.get_rng_state(), before)
    assert_same_bits(*[dict(m.named_parameters()) for m in made])
    assert forks[0] == "default" and set(forks) == {"default", *named.values()}
    assert not named or forks[-1] == "model-parallel-rng"


# ---- devices and dtypes --------------------------------------------------------------------------


@modules
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["reset", "to_empty"])
def test_meta_device(device, module, bias, how):
    with torch.device("meta"):
        made = module(32, 48, bias=bias, device="meta", init_method=torch.nn.init.ones_)
    weight = next(iter(weights_of(made).values()))
    assert {p.device.type for p in made.parameters()} == {"meta"}
    count = len(list(made.parameters()))
    for parameter in made.parameters():
        parameter.mark = "kept"
    made.reset_parameters(defer_init=True)
    assert {p.device.type for p in made.parameters()} == {"meta"}
    if how == "to_empty":
        made.to_empty(device=device)
    made.reset_parameters()
    (weight, *_), biases = weights_of(made).values(), [f"{prefix}bias" for prefix in made.LINEARS]
    assert (weight == 1).all() and len(list(made.parameters())) == count
    if how == "reset":
        assert all(p.mark == "kept" for p in made.parameters())
        tensors = [*made.parameters(), *(getattr(made, name) for name in biases)]
        assert {t.device.type for t in tensors} == {home()}
    else:
        assert {p.device.type for p in made.parameters()} == {device}
    made.to(device)
    assert all(p.isfinite().all() for p in made.parameters())
    with counted() as gemms:
        step(made, batch(device), "delayed")
    assert count_of(gemms, "delayed") == gemms_of(made)
    assert outputs_of(made) == (32 if module is te.LayerNormMLP else 48)


@modules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(device, module, dtype):
    spellings = [{"params_dtype": dtype}] + ([{"dtype": dtype}] if module is te.Linear else [])
    for options in spellings:
        made = module(32, 48, device=device, **options)
        assert {p.dtype for p in made.parameters()} == {dtype}
    if module is te.Linear:
        with pytest.raises(ValueError, match="dtype=torch.float64 and params_dtype="):
            te.Linear(32, 48, params_dtype=dtype, dtype=torch.float64, device=device)


@modules
def test_default_dtype_and_device(module):
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = module(32, 48)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in made.parameters()} == {home()}


# ---- what is shown -------------------------------------------------------------------------------

SHOWN = [
    (te.Linear, {"bias": False, "return_bias": True, "delay_wgrad_compute": True,
                 "save_original_input": True, "parameters_split": {"a": 16, "b": 32}},
     ("bias=False", "return_bias=True", "delay_wgrad_compute=True", "save_original_input=True",
      "parameters_split={'a': 16, 'b': 32}")),
    (te.LayerNormLinear, {"zero_centered_gamma": True},
     ("in_features=32", "out_features=48", "LayerNorm", "zero_centered_gamma=True")),
    (te.LayerNormMLP, {"activation": "swiglu", "checkpoint": True},
     ("hidden_size=32", "ffn_hidden_size=48", "activation=swiglu", "checkpoint=True")),
]  # fmt: skip


@pytest.mark.parametrize(("module", "options", "parts"), SHOWN)
def test_extra_repr(module, options, parts):
    shown = repr(module(32, 48, device="cpu", **options))
    for part in parts:
        assert part in shown
    assert ("zero_centered" in shown) == ("zero_centered_gamma" in options)


def test_extra_repr_of_defaults():
    plain = repr(te.Linear(32, 48, device="cpu"))
    assert plain == "Linear(in_features=32, out_features=48, bias=True)"


# ---- wrong arguments -----------------------------------------------------------------------------


@modules
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4), (4, 2.0), ("4", 4)], ids=str)
def test_wrong_sizes(module, sizes):
    names = "(in|out)_features" if module is not te.LayerNormMLP else r"\w+_size"
    with pytest.raises(
        ValueError, match=rf"{module.__name__}: {names} = .*expected a positive int"
    ):
        module(*sizes, device="cpu")


@splitting
@pytest.mark.parametrize(
    "split",
    [("a",) * 5, ("a", "a"), {"a": 40, "b": 9}, {"a": 48, "b": 0}, {"a": 60, "b": -12}, ()],
    ids=str,
)
def test_wrong_splits(module, split):
    with pytest.raises(ValueError, match=f"{module.__name__}: parameters_split="):
        module(32, 48, parameters_split=split, device="cpu")


@splitting
@pytest.mark.parametrize("split", [5, "qkv"])
def test_a_split_that_is_no_collection_of_names(module, split):
    with pytest.raises(TypeError, match="parameters_split=.*expected a sequence of names"):
        module(16, 48, parameters_split=split, device="cpu")


@splitting
def test_split_and_fused_accumulation_do_not_go_together(module):
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation and parameters_split"):
        module(32, 48, parameters_split=("a", "b"), fuse_wgrad_accumulation=True, device="cpu")


def test_wrong_activations():
    text = "LayerNormMLP: activation='tanh'; there are gelu"
    with pytest.raises(NotImplementedError, match=text):
        te.LayerNormMLP(48, 32, activation="tanh", device="cpu")
    params = {"activation": "clamped_swiglu", "activation_params": {"bound": 1}}
    with pytest.raises(ValueError, match="clamped_swiglu takes limit, alpha, glu_linear_offset"):
        te.LayerNormMLP(48, 32, device="cpu", **params)
    with pytest.raises(ValueError, match="activation_params=.*gelu takes none"):
        te.LayerNormMLP(48, 32, activation_params={"limit": 1.0}, device="cpu")
