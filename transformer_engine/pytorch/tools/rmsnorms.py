# SPDX-License-Identifier: Apache-2.0
"""Recognise the RMSNorm classes of other packages by what they compute.

Model libraries write the same norm again and again (``LlamaRMSNorm``, ``Qwen2RMSNorm``,
``T5LayerNorm``, ...), some with the factor gamma, some with 1 + gamma. A class whose name says that
it is one is tried on a copy with known weights; it is taken for one where it computes it.
"""

import contextlib
import copy
import inspect
import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

_NAMES = re.compile("RMSNorm|RmsNorm|^T5LayerNorm$")
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attributes that hold what is added to the mean square, in order of preference."""
_CLOSE = 1e-4
"""Largest error of a norm in fp32, relative to the largest value of its row."""


class Recognised(NamedTuple):
    """An RMSNorm of another package."""

    eps: float  # added to the mean square
    zero_centered: bool  # the factor is 1 + gamma
    follows_input: bool  # of another dtype than gamma the output has that of the input


def named_like_one(module: Module) -> bool:
    """Return whether the name of a module's class says that it is an RMSNorm."""
    return _NAMES.search(type(module).__name__) is not None


def recognise(module: Module) -> Recognised | str:
    """Find out which RMSNorm a module of another package, `named_like_one`, is.

    Its forward runs on the CPU, over a shallow copy that has weights of its own: neither the
    module's weights nor its hooks, device or buffers are touched, and no random number is drawn.
    Returns as text why it can not be told.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1:
        return "it has no weight of one dim, or other parameters"
    if module._buffers or module._modules:
        return "it has buffers or modules of its own"
    parameters = list(inspect.signature(type(module).forward).parameters.values())
    if len(parameters) != 2 or parameters[1].kind not in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    ):
        return "its forward takes more than the input"
    eps = next((v for v in map(module.__dict__.get, _EPS) if isinstance(v, float)), None)
    if eps is None:
        return f"it has none of {', '.join(_EPS)}"
    try:
        with torch.device("cpu"):  # transformers loads a model under torch.device("meta")
            return _try(module, eps, weight.dtype)
    except Exception as error:  # whatever a class of another package raises
        return f"trying its forward raised {type(error).__name__}: {error}"


def _try(module: Module, eps: float, dtype: torch.dtype) -> Recognised | str:
    """Compare the forward with both kinds of RMSNorm, while training and not."""
    features = module._parameters["weight"].shape[0]
    steps = torch.arange(4 * features, dtype=torch.float64)
    # Rows of several sizes, one where eps counts; with a mean, so that subtracting it shows.
    sizes = torch.tensor([[eps**0.5 or 1.0], [0.1], [1.0], [50.0]], dtype=torch.float64)
    x = ((steps * 1.7).sin().view(4, features) + 0.5) * sizes
    gamma = (steps[:features] * 0.9).cos() + 0.4
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    fits = {False, True}
    for training in (True, False):
        found = _forward(module, x.float(), gamma.float(), training).double()
        for zero_centered in list(fits):
            expected = normed * (gamma + 1.0 if zero_centered else gamma)
            error = (found - expected).abs().amax(-1)
            if not bool((error <= _CLOSE * expected.abs().amax(-1)).all()):
                fits.discard(zero_centered)
        if not fits:
            return "its forward computes something else than an RMSNorm"
        out = _forward(module, x.to(dtype), gamma.to(dtype), training)
        if out.dtype is not dtype:
            return f"its forward makes {out.dtype} of {dtype}"
    return Recognised(eps, fits.pop(), _follows_input(module, x, gamma.to(dtype)))


def _follows_input(module: Module, x: Tensor, gamma: Tensor) -> bool:
    """Return whether an input of another dtype than the weight's decides the dtype of the output.

    Not where the class takes no such input.
    """
    x = x.to(torch.bfloat16 if gamma.dtype is torch.float32 else torch.float32)
    try:
        return _forward(module, x, gamma, module.training).dtype is x.dtype
    except Exception:  # whatever a class of another package raises
        return False


def _forward(module: Module, x: Tensor, gamma: Tensor, training: bool) -> Tensor:
    """Run the forward of a module's class with another weight."""
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {"weight": Parameter(gamma, requires_grad=False)}
    trial.__dict__["training"] = training
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        return type(module).forward(trial, x)
