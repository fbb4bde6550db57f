# SPDX-License-Identifier: Apache-2.0
"""A package to the contract of the fork: implementations of kind REFERENCE, by functions of torch.

The results are in the order of the fork's reference: (y, mu, rsigma), (dx, dgamma, dbeta), (output,
mask), (out, gradient of the bias, input of gelu, extra output).
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name

from transformer_engine.plugin.core.types import BackendImplKind, OpImpl


def gelu(input, quantizer):
    return F.gelu(input, approximate="tanh")


def dgelu(grad, fwd_input, quantizer):
    x = fwd_input.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad)[0]


def swiglu(input, quantizer):
    gate, value = input.chunk(2, -1)
    return F.silu(gate) * value


def dswiglu(grad, fwd_input, quantizer):
    x = fwd_input.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(swiglu(x, None), x, grad)[0]


def layernorm_fwd(
    input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
):
    x = input.float()
    mu = x.mean(-1, keepdim=True)
    rsigma = (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    factor = weight.float() + 1 if zero_centered_gamma else weight.float()
    y = ((x - mu) * rsigma * factor + bias.float()).to(otype)
    return y, mu.reshape(-1), rsigma.reshape(-1)


def layernorm_bwd(dy, x, mu, rsigma, gamma, sm_margin=0, zero_centered_gamma=False):
    rows, grad = x.float().reshape(-1, x.shape[-1]), dy.float().reshape(-1, x.shape[-1])
    normal = (rows - mu.reshape(-1, 1)) * rsigma.reshape(-1, 1)
    factor = gamma.float() + 1 if zero_centered_gamma else gamma.float()
    scaled = grad * factor
    across, along = scaled.mean(-1, keepdim=True), (scaled * normal).mean(-1, keepdim=True)
    dx = rsigma.reshape(-1, 1) * (scaled - across - normal * along)
    dgamma, dbeta = (grad * normal).sum(0), grad.sum(0)
    return dx.to(x.dtype).view_as(x), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def generic_gemm(
    A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad,
    workspace, workspace_size, accumulate, use_split_accumulator, comm_overlap=None,
    comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=None,
):  # fmt: skip
    if gelu or quantizer is not None or grad and bias is not None:
        raise NotImplementedError("generic_gemm with gelu, a quantizer or a gradient of the bias")
    out = (B.t() if transB else B) @ (A.t() if transA else A)
    out = out if bias is None else out + bias
    if D is None:
        return out.to(output_dtype), None, None, extra_output
    D.add_(out.to(D.dtype)) if accumulate else D.copy_(out)
    return D, None, None, extra_output


def dropout_fwd(input, dropout_probability, out=None):
    mask = torch.bernoulli(torch.full_like(input, 1 - dropout_probability))
    return input * mask / (1 - dropout_probability), mask


def dropout_bwd(grad_output, mask, dropout_probability, grad_input=None):
    return grad_output * mask / (1 - dropout_probability)


FUNCTIONS = (
    gelu, dgelu, swiglu, dswiglu, layernorm_fwd, layernorm_bwd, generic_gemm, dropout_fwd,
    dropout_bwd,
)  # fmt: skip


def te_fl_register(registry):
    for fn in FUNCTIONS:
        registry.register_impl(
            OpImpl(
                op_name=fn.__name__,
                impl_id="reference.eager",
                kind=BackendImplKind.REFERENCE,
                fn=fn,
                priority=60,
            )
        )
