# SPDX-License-Identifier: Apache-2.0
"""What linear modules must compute, and what a call of those with a norm computed with.

`definition` is the whole module in float64. `Step` runs a forward and a backward and reads back the
operands that the module's GEMMs had: what its forward saved, and what its backward put off with
`delay_wgrad_compute`. So every operator is compared with float64 on its very inputs: a cast by its
codes, a GEMM by the error of its sum, and no cast that rounded the other way hides an error.
"""

import math

import layer_reference
import numpy as np
import reference
import torch
from comparators import assert_cast_within, assert_nmse, assert_within, nmse
from layer_reference import wide
from pytorch.helpers import FP8, assert_same_bits, high_precision_bound, state_of, sum_bound
from pytorch.module_cases import region
from tols import BF16, EPS, F32, GELU_GAIN, PASSED_ON, tol

from transformer_engine import _core
from transformer_engine.common.plans import extent_value

KINDS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
ACTIVATIONS = tuple(layer_reference.ACTIVATIONS)
KINKED = {"relu", "reglu"}
"""Their derivatives jump at 0: there an input whose sign is in doubt has either."""


def values_of(module):
    """Names to float64 copies of the parameters."""
    return {name: wide(parameter) for name, parameter in module.named_parameters()}


# ---- the definition ------------------------------------------------------------------------------


def norm64(module, x, values):
    """The norm of [rows, features]; of a module without one, the rows themselves."""
    if "layer_norm_weight" not in values:
        return x
    gamma = values["layer_norm_weight"] + float(module.zero_centered_gamma)
    beta = values.get("layer_norm_bias", torch.zeros_like(gamma))
    return layer_reference.norm(KINDS[module.normalization], x, gamma, beta, module.eps)


def linear64(module, prefix, x, values):
    bias = values.get(f"{prefix}bias")
    if prefix == module.LINEARS[-1] and not module.apply_bias:
        bias = None
    return torch.nn.functional.linear(x, values[f"{prefix}weight"], bias)


def definition(module, x, values):
    """(output, norm output), each [rows, features], in float64."""
    normed = y = norm64(module, x.flatten(0, -2), values)
    for prefix in module.LINEARS:
        y = linear64(module, prefix, y, values)
        if prefix == "fc1_":
            y = layer_reference.activation(module.activation, y)
    return y, normed


def rows_off_kinks(module, x, dtype):
    """Rows of x for which no value before the activation is near 0, where relu has its kink."""
    if getattr(module, "activation", None) not in KINKED:
        return x
    values = values_of(module)
    before = linear64(module, "fc1_", norm64(module, wide(x), values), values)
    active = before[:, : module.ffn_hidden_size] if module.activation != "relu" else before
    return x[(active.abs() > 8 * EPS[dtype]).all(1).to(x.device)]


# ---- what a step left behind ---------------------------------------------------------------------


def saved_buffers(plan, rows, packed):
    """Members of the packed saved tensor of a forward plan, by name."""
    offsets, sizes = _core.plan_infer(plan.native, rows)[2], (0, rows)
    members = {}
    for buffer, at in zip(plan.described.buffers, offsets, strict=True):
        if buffer.role == "saved":
            dtype = _core.torch_dtype(buffer.dtype)
            shape = [extent_value(extent, sizes) for extent in buffer.shape]
            size = math.prod(shape) * dtype.itemsize
            members[buffer.name] = packed[at : at + size].view(dtype).view(shape)
    return members


class Step:
    """A forward and a backward of a module made with ``delay_wgrad_compute=True``.

    Attributes
    ----------
    buffers : dict
        What the forward saved and the backward left for the weight gradients, by name.
    out : Tensor
        Output.
    grads : dict
        "x" and the parameters' names to gradients.
    numbers : dict
        Those of clamped_swiglu, where they are not its defaults.
    before, after : dict or None
        Delayed-scaling state around the step.
    """

    def __init__(self, module, x, grad, recipe, **numbers):
        self.module, self.recipe, self.numbers = module, recipe, numbers
        self.x, self.grad = x, grad
        self.before = state_of(module)
        inp = x.detach().clone().requires_grad_()
        module.zero_grad()
        with region(recipe):
            plan = dict(module.plans_of(inp))["forward"]
            self.out = module(inp)
        saved = self.out.grad_fn.saved_tensors
        packed = next(t for t in saved if t.dtype == torch.uint8)
        self.rows = x.shape[:-1].numel()
        self.buffers = saved_buffers(plan, self.rows, packed)
        self.out.backward(grad)
        pending = module._wgrads[-1]
        described = pending.plans.wgrad.described.buffers
        names = [b.name for b in described if b.role in ("input", "parameter")]
        self.buffers |= zip(names, pending.inputs, strict=True)
        module.backward_dw()
        self.grads = {"x": inp.grad} | {n: p.grad for n, p in module.named_parameters()}
        self.after = state_of(module)

    def codes(self, name):
        """FP8 codes of an operand [rows, columns] from its column-wise form."""
        column = self.buffers[f"{name}_column"].cpu()
        padding = column.view(torch.uint8)[:, self.rows :]
        assert (padding == 0).all(), f"{name}: padding"
        return column.t()[: self.rows].contiguous()

    def operand(self, name):
        """What the weight-gradient GEMM multiplies, in float64 [rows, columns]."""
        if self.recipe is not None:
            pair = self.buffers[f"{name}_scales"]
            return self.codes(name).double() * pair[0].double().cpu()
        return wide(self.wide_operand(name)).flatten(0, -2)

    def wide_operand(self, name):
        """The value that an operand is, in high precision."""
        if name.endswith("grad_output"):
            found = "grad_fc1_output" if name == "fc1_grad_output" else "grad_output"
        elif name == "fc2_input":
            found = name
        else:
            found = "norm_output" if self.module.NORM is not None else "input"
        assert found in self.buffers, f"{name} is not among {list(self.buffers)}"
        return self.buffers[found]

    def weight(self, prefix):
        """What the forward and input-gradient GEMMs multiply, in float64."""
        weight = getattr(self.module, f"{prefix}weight").detach()
        if self.recipe is None:
            return wide(weight)
        pair = self.buffers[f"{prefix}weight_scales"].cpu()
        codes = reference.quantize(weight, float(pair[1]), self.formats[0])
        return codes.double() * pair[0].double()

    @property
    def formats(self):
        return [FP8[self.recipe.fp8_format.dtype_name(d)] for d in ("fwd", "bwd")]

    @property
    def activates_in_gemm(self):
        """GELU of 16 bits is the epilogue of its GEMM where no cast to FP8 follows."""
        gelu = getattr(self.module, "activation", None) == "gelu"
        return gelu and self.recipe is None and self.out.dtype is not F32

    def activation(self, before):
        return layer_reference.activation(self.module.activation, before, **self.numbers)

    # ---- checks ----

    def bound(self, depth, fast=False):
        """Normalised error of one GEMM of the step."""
        dtype = self.out.dtype
        if self.recipe is None:
            return high_precision_bound(dtype, depth)
        return sum_bound(self.x.device.type, dtype, depth, fast)

    def check_operand(self, name, exact, terms, depth=1):
        """An operand made from exactly known values: its codes, or its values."""
        if self.recipe is None:
            assert_within(self.wide_operand(name).flatten(0, -2), exact, terms, depth)
            return
        pair = self.buffers[f"{name}_scales"].cpu()
        assert pair[0] == np.float32(1) / np.float32(pair[1]), f"{name}: pair {pair}"
        if not self.recipe.delayed():
            expected = reference.FP8_MAX[self.formats[0]] / float(exact.abs().max())
            low = 0.5 if self.recipe.use_power_2_scales else 1 - tol("amax", F32)
            assert low <= float(pair[1]) / expected <= 1 + tol("amax", F32)
        assert_cast_within(self.codes(name), exact, float(pair[1]), terms, depth)

    def check_forward(self):
        """Norm, casts, GEMMs and activation on their own inputs."""
        module, values = self.module, values_of(self.module)
        x = wide(self.x).flatten(0, -2)
        kind = KINDS[module.normalization]
        gamma = values["layer_norm_weight"] + float(module.zero_centered_gamma)
        beta = values.get("layer_norm_bias", torch.zeros_like(gamma))
        exact = norm64(module, x, values)
        terms = layer_reference.norm_terms(kind, x, gamma, beta, module.eps)
        half = torch.float16 if self.out.dtype is torch.float16 else torch.bfloat16
        for prefix in module.LINEARS:
            columns = exact.shape[1]
            if terms is not None:
                self.check_operand(f"{prefix}input", exact, terms, columns)
            exact = self.operand(f"{prefix}input") @ self.weight(prefix).T
            bias = getattr(module, f"{prefix}bias") if module.use_bias else None
            if bias is not None and (prefix == "fc1_" or module.apply_bias):
                # An FP8 GEMM takes the bias in 16 bits.
                exact += wide(bias if self.recipe is None else bias.to(half))
            found = self.out if prefix != "fc1_" else self.buffers["fc1_output"]
            assert found.dtype == self.out.dtype
            assert_nmse(found.reshape(exact.shape), exact, self.bound(columns, fast=True))
            if prefix == "fc1_" and self.activates_in_gemm:
                self.check_epilogue(exact, columns)
                terms = None
            elif prefix == "fc1_":
                before = wide(found)
                exact = self.activation(before)
                terms = layer_reference.activation_terms(module.activation, before, **self.numbers)

    def check_epilogue(self, before, depth):
        """The epilogue activates what is not rounded yet."""
        fast = "gelu" if self.x.device.type == "cpu" else "gelu_fast"
        bound = tol("round", self.out.dtype) + GELU_GAIN * tol("sum", F32, depth) + tol(fast, F32)
        exact = layer_reference.activation("gelu", before)
        assert_nmse(self.operand("fc2_input"), exact, bound)

    def check_backward(self):
        """Gradients of every GEMM's very operands; between them, float64 of the derivatives."""
        module = self.module
        exact = wide(self.grad).flatten(0, -2)
        error = 0.0
        for prefix in reversed(module.LINEARS):
            self.check_gradient_cast(prefix, exact, error)
            operand = self.operand(f"{prefix}grad_output")
            passed = error + tol("sum", F32, self.rows) + tol("round", self.out.dtype)
            if module.use_bias and (prefix == "fc1_" or module.apply_bias):
                assert_nmse(self.grads[f"{prefix}bias"], exact.sum(0), PASSED_ON * passed)
            weight = operand.T @ self.operand(f"{prefix}input")
            assert_nmse(self.grads[f"{prefix}weight"], weight, self.bound(self.rows))
            exact = operand @ self.weight(prefix)
            error = PASSED_ON * self.bound(operand.shape[1])
            if prefix == "fc2_":
                before = wide(self.buffers["fc1_output"]).requires_grad_()
                made = self.activation(before)
                (exact,) = torch.autograd.grad(made, before, exact)
        self.check_norm_backward(exact, error + tol("round", self.out.dtype))

    def check_gradient_cast(self, prefix, exact, error):
        """The cast of an output gradient that is known up to an error."""
        name = f"{prefix}grad_output"
        if self.recipe is None:
            bound = error + (tol("round", self.out.dtype) if error else 0.0)
            assert nmse(self.operand(name), exact) <= bound
            return
        scale = float(self.buffers[f"{name}_scales"][1])
        dtype = self.formats[1]
        if not error:  # what the caller gave: bits
            given = self.grad.flatten(0, -2)
            assert_same_bits(self.codes(name), reference.quantize(given, scale, dtype))
            return
        if not self.recipe.delayed():  # what maps the largest number to the largest code
            expected = reference.FP8_MAX[dtype] / float(exact.abs().max())
            low = 0.5 if self.recipe.use_power_2_scales else 1 - tol("amax", BF16)
            assert low <= scale / expected <= 1 + tol("amax", BF16)
        codes = reference.quantize(exact.float(), scale, dtype)
        # The derivation takes squares of 4 times their mean; gated activations have heavier tails.
        peak = max(1.0, float(exact.square().max() / exact.square().mean()) / 4)
        bound = math.sqrt(error) * EPS[dtype] + peak * tol("recast", dtype) / exact.numel()
        assert_nmse(self.codes(name).double(), codes.double(), bound)

    def check_norm_backward(self, grad, error):
        module = self.module
        values = {n: v.requires_grad_() for n, v in values_of(module).items() if "layer_norm" in n}
        x = wide(self.x).flatten(0, -2).requires_grad_()
        wanted = {"x": x, **values}
        made = norm64(module, x, values)
        grads = torch.autograd.grad(made, list(wanted.values()), grad)
        for (name, tensor), exact in zip(wanted.items(), grads, strict=True):
            bound = PASSED_ON * (error + tol("sum", F32, tensor.numel()))
            assert_nmse(self.grads[name].reshape(exact.shape), exact, bound)

    def check_scaling(self):
        """Which slot scaled what, and which amax it recorded; slots of no tensor are untouched."""
        used = {"forward": [], "backward": []}
        for i, prefix in enumerate(self.module.LINEARS):
            slots = {"input": 3 * i, "weight": 3 * i + 1, "grad_output": 2 * i}
            for tensor, slot in slots.items():
                direction = "backward" if tensor == "grad_output" else "forward"
                used[direction].append(slot)
                self._check_slot(direction, slot, f"{prefix}{tensor}")
        if not self.recipe.delayed():
            assert self.after is None
            return
        for direction, slots in used.items():
            scale, history = self.after[direction]
            for slot in set(range(scale.numel())) - set(slots):
                assert scale[slot] == 1 and (history[:, slot] == 0).all(), f"{direction} {slot}"

    def _check_slot(self, direction, slot, name):
        """The scale of a cast, and its amax: the number whose code is the largest one."""
        used = self.buffers[f"{name}_scales"].cpu()[1]
        dtype = self.formats[direction == "backward"]
        exact = {"weight": self.module.get_parameter, "grad_output": lambda _: self.grad}
        known = name.endswith("weight") or name == f"{self.module.LINEARS[-1]}grad_output"
        given = exact[name.removeprefix("fc1_").removeprefix("fc2_")](name) if known else None
        codes = self.codes(name) if given is None or direction == "backward" else None
        if codes is None:
            codes = reference.quantize(given.detach(), float(used), dtype)
        largest = codes.float().abs().max()
        if self.recipe.delayed():
            before = 1.0 if self.before is None else self.before[direction][0][slot]
            assert used == before, f"{name}: cast with {used}, its slot has {before}"
            amax = self.after[direction][1][-1, slot].reshape(1)  # an update has rolled it there
            assert known is False or amax == reference.amax(given)
            made = reference.quantize(amax, float(used), dtype)
            assert made.float() == largest, f"{name}: amax {amax}, largest code {largest}"
        else:
            power_2 = self.recipe.use_power_2_scales
            limit = reference.FP8_MAX[dtype]
            assert limit / (2 if power_2 else 1) <= largest <= limit
            if known:
                amax = reference.amax(given)
                assert used == float(reference.current_scale(amax, limit, power_2=power_2))
