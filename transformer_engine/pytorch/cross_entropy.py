# SPDX-License-Identifier: Apache-2.0
"""`parallel_cross_entropy`: the loss of a language model."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.torchside.collectives import get_distributed_world_size
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

__getattr__, __dir__ = absent.attach(globals())


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """Cross entropy of logits and targets, computed in fp32 by torch's operator.

    Parameters
    ----------
    inp : Tensor
        [B, S, V] or [S, B, V] logits.
    target : Tensor
        B * S classes in the order of `inp`, of an integer dtype.
    label_smoothing : float, default 0
        Share of the target that is spread evenly over all classes.
    reduce_loss : bool, default False
        The mean over the targets that are not ignored.
    dist_process_group : ProcessGroup, optional
        Ranks that the classes are split over: one.
    ignore_idx : int, default -100
        Targets of this value have no loss and no gradient.
    is_cg_capturable : bool, default False
        Accepted: no call waits for the device.
    overwrite_input : bool, default False
        Accepted: `inp` may be overwritten by the gradient, and is not.

    Returns
    -------
    Tensor
        fp32, the leading shape of `inp`, or [1] where reduced.

    Raises
    ------
    ValueError
        Shapes that do not go together.
    TypeError
        `_input`, an older name of `inp`, is given; or what is no tensor.
    NotImplementedError
        For a group of several ranks.
    """
    del is_cg_capturable, overwrite_input
    if _input is not None:
        raise TypeError("parallel_cross_entropy: _input=...: its name is inp")
    expect_tensor("parallel_cross_entropy: inp", inp)
    expect_tensor("parallel_cross_entropy: target", target)
    if inp.dim() != 3 or target.numel() != inp.shape[:-1].numel():
        raise ValueError(
            f"parallel_cross_entropy: inp {tuple(inp.shape)}, target {tuple(target.shape)}: "
            "expected three dims and a target for each of the first two"
        )
    if dist_process_group is not None:
        ranks = get_distributed_world_size(dist_process_group)
        if ranks > 1:
            name = "pytorch.cross_entropy.parallel_cross_entropy"
            raise absent.refusal(name, f" over {ranks} ranks")
    classes = target.reshape(-1).long()
    logits = inp.reshape(-1, inp.shape[-1]).float()
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    loss = torch.nn.functional.cross_entropy(logits, classes, ignore_index=ignore_idx, **options)
    if not reduce_loss:
        return loss.view(inp.shape[:-1])
    counted = (classes != ignore_idx).sum().clamp(min=1)
    return (loss.sum() / counted).view(1)
