# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallel of torch (FSDP1) around modules of this library.

It frees parameters after the forward and gathers them for the backward. Modules here save the
parameters themselves, and cast them again: no quantized copy of a whole weight outlives the forward
but the one that microbatches share (``is_first_microbatch``). Other tensors that they save are of a
rank's own batch, so there is nothing that ranks could keep for each other.
"""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as _TorchFSDP

from transformer_engine.pytorch.module.base import NativeModule
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized


def _check_parameters(module: torch.nn.Module, op: str) -> None:
    """RuntimeError for quantized parameters, which FSDP1 can not put into one flat tensor."""
    for name, parameter in module.named_parameters():
        if is_quantized(parameter):
            raise RuntimeError(
                f"{op}: {name} is a quantized parameter, which FSDP1 does not shard: use "
                "torch.distributed.fsdp.fully_shard, or make the model outside of "
                "quantized_model_init"
            )


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Tell the modules of this library in a model under FSDP1 the ranks that share its parameters.

    Each module that is wrapped by itself gets the process group as its ``fsdp_group``.

    Parameters
    ----------
    fsdp_root : torch.distributed.fsdp.FullyShardedDataParallel
        The wrapped model.

    Raises
    ------
    TypeError
        The model is not wrapped.
    RuntimeError
        A parameter is quantized.
    """
    op = "prepare_te_modules_for_fsdp"
    if not isinstance(fsdp_root, _TorchFSDP):
        raise TypeError(
            f"{op}: fsdp_root: {type(fsdp_root).__name__}, expected a model in "
            "torch.distributed.fsdp.FullyShardedDataParallel"
        )
    _check_parameters(fsdp_root, op)
    for wrapper in fsdp_root.modules():
        if isinstance(wrapper, _TorchFSDP) and isinstance(wrapper.module, NativeModule):
            wrapper.module.fsdp_group = wrapper.process_group


class FullyShardedDataParallel(_TorchFSDP):
    """That of torch, prepared: see `prepare_te_modules_for_fsdp`.

    Parameters
    ----------
    module : torch.nn.Module
        The model; RuntimeError where a parameter is quantized.
    *args, **kwargs
        As of `torch.distributed.fsdp.FullyShardedDataParallel`.
    """

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _check_parameters(module, "FullyShardedDataParallel")
        super().__init__(module, *args, **kwargs)
        prepare_te_modules_for_fsdp(self)
