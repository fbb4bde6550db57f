# SPDX-License-Identifier: Apache-2.0
"""A package to the contract of the fork: implementations ``default.flagos``, by flag_gems.

As such packages do, a class has the operators as methods, and wrappers that say whether they are
available. What it can not do it asserts.
"""

import functools

import flag_gems
import torch

from transformer_engine.plugin.core.types import BackendImplKind, OpImpl

OPERATORS = (
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "generic_gemm",
    "multi_tensor_scale",
    "multi_tensor_l2norm",
)


class FlagOSBackend:
    @staticmethod
    def is_available():
        return True

    def rmsnorm_fwd(
        self, input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
    ):
        assert quantizer is None
        factor = weight + 1 if zero_centered_gamma else weight
        y, inverse = flag_gems.rms_norm_forward(input, [input.shape[-1]], factor, eps)
        return y, None, inverse.reshape(-1)

    def rmsnorm_bwd(self, dy, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False, eps=1e-05):
        factor = gamma + 1 if zero_centered_gamma else gamma
        return flag_gems.rms_norm_backward(dy, x, rsigma, [x.shape[-1]], factor, eps)

    def generic_gemm(
        self, A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in,
        grad, workspace, workspace_size, accumulate, use_split_accumulator, comm_overlap=None,
        comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=None,
    ):  # fmt: skip
        assert not gelu and gelu_in is None and quantizer is None and bias is None
        left, right = B.t() if transB else B, A.t() if transA else A
        out = flag_gems.mm(left.reshape(-1, left.shape[-1]), right)
        if D is None:
            return out.to(output_dtype), None, None, extra_output
        D.add_(out.to(D.dtype)) if accumulate else D.copy_(out)
        return D, None, None, extra_output

    def multi_tensor_scale(self, chunk_size, noop_flag, tensor_lists, scale):
        for source, target in zip(*tensor_lists, strict=True):
            target.copy_(source * scale)

    def multi_tensor_l2norm(self, chunk_size, noop_flag, tensor_lists, per_tensor=False):
        norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
        return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def _bind_is_available(fn, is_available_fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        with flag_gems.use_gems():
            return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn
    return wrapper


def register(registry):
    backend = FlagOSBackend()
    impls = [
        OpImpl(
            op_name=name,
            impl_id="default.flagos",
            kind=BackendImplKind.DEFAULT,
            fn=_bind_is_available(getattr(backend, name), backend.is_available),
            vendor=None,
            priority=150,
        )
        for name in OPERATORS
    ]
    registry.register_many(impls)
