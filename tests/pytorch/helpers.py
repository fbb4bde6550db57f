# SPDX-License-Identifier: Apache-2.0
"""What the tests of the PyTorch front end share: recipes, counted GEMMs, independent references.

What a layer must compute and what its scaling state must hold is modelled here from the
definitions, by way of `reference`; nothing of it calls the package.
"""

import contextlib
import gc
import types

import numpy as np
import reference
import torch
from comparators import assert_nmse
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.scaling_state.arenas import all_domains

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "delayed-e4m3": lambda: DelayedScaling(amax_history_len=3, margin=1, fp8_format=Format.E4M3),
    "current": Float8CurrentScaling,
    "current-power2": lambda: Float8CurrentScaling(use_power_2_scales=True),
}


# ---- counters ------------------------------------------------------------------------------------


NATIVE = ("tensor", "block_1d", "block_2d", "row")
"""Kinds of FP8 that CPU and CUDA multiply as they are; others are multiplied out everywhere."""


def gemm_counts():
    """(GEMMs with two FP8 operands, other GEMMs) since the last reset of the counters.

    Where a device has no kernels of ours, a GEMM of FP8 is one of what was multiplied out.
    """
    counts = _core.counters()
    fp8 = other = 0
    for name, value in counts.items():
        kind, _, rest = name.partition(".")
        if kind == "gemm":
            _, a, b = rest.split(".")
            if {a, b} <= {"e4m3", "e5m2"}:
                fp8 += value
            else:
                other += value
    if any(name.startswith("gemm.npu.") for name in counts):
        multiplied_out = sum(counts.get(f"emulated.{kind}", 0) for kind in NATIVE)
        return fp8 + multiplied_out, other - multiplied_out
    return fp8, other


@contextlib.contextmanager
def counted():
    """Count what runs in the block: `fp8` and `other` GEMMs of the result are set at its end."""
    result = types.SimpleNamespace(fp8=None, other=None)
    _core.reset_counters()
    yield result
    result.fp8, result.other = gemm_counts()


# ---- random numbers ------------------------------------------------------------------------------


def same_draws(device):
    """What a block draws, the next one draws too: the generators go back to where it began."""
    kind = torch.device(device).type
    return torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind)


def random_of(device):
    """What has `get_rng_state` and `set_rng_state` of the generator that a device draws from."""
    kind = torch.device(device).type
    return torch if kind == "cpu" else torch.get_device_module(kind)


def data_generator():
    """A generator on the CPU that draws the same at each call after one `torch.manual_seed`.

    Its seed is next to the one given there, so that torch's own generator draws other numbers.
    """
    return torch.Generator().manual_seed(torch.initial_seed() + 1)


# ---- graphs of CUDA ------------------------------------------------------------------------------


@contextlib.contextmanager
def side_stream():
    """A new stream of CUDA is current in the block: it waits for the old one, then that for it.

    What a graph will capture warms up there: autograd accumulates the gradient of a leaf on the
    stream of the call that met it first, and a capture may not wait for the default one.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def captured(run, warm_ups=0):
    """(CUDA graph of a call of `run`, the call's result), after calls of it on a side stream.

    Capturing runs nothing: the tensors of the result hold values once the graph is replayed.
    """
    if warm_ups:
        with side_stream():
            for _ in range(warm_ups):
                run()
    gc.collect()  # graphs of former tests: what ends them, in the middle of a capture, ends that
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


# ---- bits ----------------------------------------------------------------------------------------


def same_bits(a, b):
    """Whether two tensors have one dtype, one shape and the same bytes."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_same_bits(a, b, what=""):
    """Assert `same_bits` for two tensors, or for two equally nested containers of tensors."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), what
        for key in a:
            assert_same_bits(a[key], b[key], f"{what}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), what
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_same_bits(*pair, f"{what}[{number}]")
    else:
        assert same_bits(a, b), f"{what}: {a} and {b} differ"


# ---- scaling state -------------------------------------------------------------------------------


def state_of(module):
    """Copy of the scaling state of a module: direction -> (scale [n], history [length, n])."""
    values = module._state_values()
    return None if values is None else {d: tuple(t.clone() for t in v) for d, v in values.items()}


def states_of_tracker(tracker):
    """Random states by name, as bytes: on CUDA a tracker has generators."""
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }


def states_of(model):
    """State of every module of a model that may have one, in order: of attentions those in FP8."""
    modules = [m for m in model.modules() if hasattr(m, "_state_values")]
    found = [(m, state_of(m)) for m in modules]
    return [state for m, state in found if state or not isinstance(m, te.DotProductAttention)]


def arenas(direction):
    """Where the scaling state of all modules lies: `arenas.Arena` objects."""
    found = all_domains()
    return [arena for domain in found for arena in domain.arenas[direction].values()]


class LinearModel:
    """The scaling state of one linear layer, from the definition of delayed scaling."""

    SLOTS = {"forward": 3, "backward": 2}

    def __init__(self, recipe):
        self.recipe = recipe
        self.scale = {d: np.ones(n, np.float32) for d, n in self.SLOTS.items()}
        shape = {d: (recipe.amax_history_len, n) for d, n in self.SLOTS.items()}
        self.history = {d: np.zeros(s, np.float32) for d, s in shape.items()}

    def record(self, direction, slot, tensor):
        """A cast of a tensor: row 0 keeps the largest magnitude."""
        row = self.history[direction][0]
        row[slot] = max(row[slot], reference.amax(tensor))

    def update(self, direction):
        """One update of a direction."""
        fp8_max = self.recipe.fp8_format.fp8_max("fwd" if direction == "forward" else "bwd")
        self.scale[direction], self.history[direction] = reference.delayed_update(
            self.scale[direction],
            self.history[direction],
            fp8_max * 2.0**-self.recipe.margin,
            self.recipe.amax_compute_algo == "most_recent",
        )

    def values(self):
        """The state in the form of `state_of`."""
        return {
            d: (torch.from_numpy(self.scale[d].copy()), torch.from_numpy(self.history[d].copy()))
            for d in self.SLOTS
        }


class Watch:
    """Feeds `LinearModel`s from the tensors that the layers of a model meet.

    Forward inputs come from forward hooks, output gradients from tensor hooks, which run just
    before the layer's own backward. `updates_after` is the number of the layer whose backward is
    followed by the backward update; the update is applied when the next event comes, or by `check`.
    """

    def __init__(self, layers, recipe, updates_after=0):
        self.layers = list(layers)
        self.models = [LinearModel(recipe) for _ in self.layers]
        self.updates_after = updates_after
        self.pending = False
        self.handles = [
            layer.register_forward_hook(self._hook(number))
            for number, layer in enumerate(self.layers)
        ]

    def _hook(self, number):
        def hook(module, args, output):
            model = self.models[number]
            model.record("forward", 0, args[0])
            model.record("forward", 1, module.weight)
            if output.requires_grad:
                output.register_hook(lambda grad: self._gradient(number, grad))

        return hook

    def _gradient(self, number, grad):
        self.finish_backward()
        self.models[number].record("backward", 0, grad)
        self.pending = number == self.updates_after

    def finish_backward(self):
        """Apply a backward update that is due."""
        if self.pending:
            self.pending = False
            for model in self.models:
                model.update("backward")

    def leave_region(self):
        """What leaving the outermost region does."""
        for model in self.models:
            model.update("forward")

    def check(self):
        """Assert that every layer's state equals its model, bit for bit."""
        self.finish_backward()
        for number, (layer, model) in enumerate(zip(self.layers, self.models, strict=True)):
            found = state_of(layer) or LinearModel(model.recipe).values()
            assert_same_bits(found, model.values(), f"layer {number}")


# ---- what a linear layer computes ----------------------------------------------------------------


def dequantized(tensor, dtype, scale):
    """What a tensor reads as after the cast to FP8 with a scale, in float64 on the CPU."""
    codes = reference.quantize(tensor, scale, dtype)
    inverse = np.float32(1.0) / np.float32(scale)
    return codes.double() * float(inverse)


def sum_bound(device, dtype, depth, fast=False):
    """Normalised error of a GEMM with FP8 operands over `depth` products, written in `dtype`."""
    rounding = tol("round", dtype)
    if device == "cpu":
        return rounding + tol("sum", torch.float32, depth)
    return rounding + tol("sum_fast" if fast else "sum_split", torch.float8_e4m3fn, depth)


def assert_same_gemm(found, expected, device, recipe, depth, what=""):
    """Same bits, but for cuBLASLt in high precision.

    It chooses its algorithm by alignment, strides and epilogue; the order of the sum goes with it.
    Each of the two is within the bound of the exact product, so they are within twice its root of
    each other. An FP8 GEMM always reads what quantize wrote, in one layout.
    """
    if recipe is not None or device == "cpu":
        assert_same_bits(found, expected, what)
        return
    assert found.dtype == expected.dtype
    assert_nmse(found, expected.double(), 4 * high_precision_bound(found.dtype, depth), what)


def high_precision_bound(dtype, depth):
    """Normalised error of a GEMM in high precision over `depth` products, written in `dtype`."""
    return tol("round", dtype) + tol("sum", torch.float32, depth)


class Fp8Linear:
    """Output and gradients of a linear layer whose GEMM operands went through FP8, in float64.

    Parameters
    ----------
    layer : Linear
        Read, not called.
    recipe : Recipe
        Formats, and the scales of current scaling.
    forward, backward : Tensor or None
        Scales of the slots (delayed scaling).
    """

    def __init__(self, layer, recipe, forward=None, backward=None):
        self.layer, self.recipe = layer, recipe
        self.formats = [FP8[recipe.fp8_format.dtype_name(d)] for d in ("fwd", "bwd")]
        self.forward, self.backward = forward, backward

    def _cast(self, tensor, dtype, scales, slot):
        if scales is not None:
            return dequantized(tensor, dtype, float(scales[slot]))
        power_2 = self.recipe.use_power_2_scales
        largest = reference.FP8_MAX[dtype]
        scale = reference.current_scale(reference.amax(tensor), largest, power_2=power_2)
        return dequantized(tensor, dtype, scale)

    def run(self, x, grad):
        """Names to (float64 tensor, number of products summed up, fast accumulation or not)."""
        half = torch.float16 if grad.dtype is torch.float16 else torch.bfloat16
        x, grad = x.detach().flatten(0, -2), grad.detach().flatten(0, -2)
        weight, bias = self.layer.weight.detach(), self.layer.bias.detach()
        fp8_x = self._cast(x, self.formats[0], self.forward, 0)
        fp8_w = self._cast(weight, self.formats[0], self.forward, 1)
        fp8_g = self._cast(grad, self.formats[1], self.backward, 0)
        out = fp8_x @ fp8_w.T
        if self.layer.apply_bias:  # the GEMM takes the bias in 16 bits
            out += bias.to(half).double().cpu()
        result = {
            "out": (out, x.shape[1], True),
            "x": (fp8_g @ fp8_w, weight.shape[0], False),
            "weight": (fp8_g.T @ fp8_x, x.shape[0], False),
        }
        if self.layer.apply_bias:
            result["bias"] = (grad.double().sum(0).cpu(), x.shape[0], False)
        return result


# ---- stages in Python ----------------------------------------------------------------------------


def quantize_like_the_library(source, buffers, name, slot):
    """A quantizer in torch operations: delayed scaling from a chunk, or the amax of the tensor."""
    x = source.reshape(-1, source.shape[-1]).float()
    if "scale" in buffers:
        scale = buffers["scale"][slot].clone()
        history = buffers["history"]
        history[0, slot] = torch.maximum(history[0, slot], x.abs().max())
    else:
        scale = torch.tensor(448.0, device=x.device) / x.abs().max()  # 448 / t is not rounded once
    pair = buffers[f"{name}_scales"]
    pair[0] = 1.0 / scale
    pair[1] = scale
    codes = (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    for usage, data in (("row", codes), ("column", codes.t())):
        out = buffers.get(f"{name}_{usage}")
        if out is not None:
            out.view(torch.uint8).zero_()
            out.view(torch.uint8)[:, : data.shape[1]] = data
