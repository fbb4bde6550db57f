# SPDX-License-Identifier: Apache-2.0
"""`Linear`: y = x W^T + b with FP8 GEMMs inside `autocast`."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.common import absent
from transformer_engine.pytorch.module.parameters import checked_dtype, device_of
from transformer_engine.pytorch.module.weight_module import WeightModule

__getattr__, __dir__ = absent.attach(
    globals(), lazy={"general_gemm": "transformer_engine.pytorch.cpp_extensions.gemm"}
)
__all__ = ["Linear", *absent.names_of(__name__)]


class Linear(WeightModule):
    """Linear layer, a drop-in for `torch.nn.Linear`, with FP8 GEMMs inside `autocast`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of an input and an output sample. Any size works; multiples of 16 need no padding.
    tp_group : ProcessGroup, optional
        Ranks that the layer is split over. It can be given later (`set_tensor_parallel_group`).
    tp_size : int, default 1
        How many these are; without a group before the first forward that raises a RuntimeError.
    parallel_mode : {None, "column", "row"}
        What a rank has of the weight: "column", ``out_features / tp_size`` outputs, whose input is
        the same on all ranks; "row", ``in_features / tp_size`` inputs, and outputs that are summed
        over the ranks, before the bias. None: all of it, and nothing is exchanged. Parameters say
        so to frameworks (``partition_dim``, docs/distributed.md).
    sequence_parallel : bool, default False
        Ranks have other rows outside of the layer, in the order of the ranks along the first dim:
        "column" gathers its input, "row" leaves each rank its rows of the sum. In FP8 codes and
        scales are gathered.
    symmetric_ar_type : {None, "nccl", "multimem_all_reduce", "two_shot", "one_shot"}
        How outputs are summed; over several ranks None or "nccl".
    ub_overlap_ag, ub_overlap_rs : bool, default False
        With `sequence_parallel`, in high precision and with one scale for the tensor, a GEMM runs
        in pieces while rows travel: that of this rank's rows while the others are gathered (of an
        input, and of a gradient), that of the others' rows first where outputs are summed.
    ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        Sums of the backward overlap its other GEMM whatever these say. The first excludes the
        others with `sequence_parallel`, where outputs are split.
    ub_name : str, optional
        Which of the layers that `initialize_ub` measures it is: "qkv", "proj", "fc1" or "fc2".
    fuse_wgrad_accumulation : bool, default False
        Add the weight gradient to ``weight.main_grad`` (fp32, bf16 or fp16, whatever the operands:
        added in fp32 and rounded once) inside its GEMM instead of returning it. Overwritten instead
        for ``is_first_microbatch=True`` or where ``weight.overwrite_main_grad`` is true.
    get_rng_state_tracker : callable, optional
        Returns a tracker whose ``fork(rng_tracker_name)`` is entered while parameters are made.
    rng_tracker_name : str, optional
        The name to fork.
    init_method : callable, optional
        ``f(weight)`` that initialises in place; normal with mean 0 and deviation 0.023 where None.
        Biases begin at 0.
    bias : bool, default True
        Have a bias.
    return_bias : bool, default False
        Return (output, bias) and leave adding the bias to the caller.
    params_dtype : torch.dtype, optional
        dtype of the parameters; torch's default dtype where None. ``dtype`` is an alias.
    parameters_split : sequence of str or dict of str to int, optional
        Keep the weight and bias as several parameters along the outputs, ``<name>_weight`` and
        ``<name>_bias``: equal parts for a sequence, the given sizes for a dict.
    device : torch.device or str, optional
        Where the parameters are made. Where None, on the device of an enclosing
        ``with torch.device(...)`` or of `torch.set_default_device`; without one on "cuda" where
        there is a GPU, else "cpu". On "meta" they have no data until `reset_parameters`.
    delay_wgrad_compute : bool, default False
        The backward leaves the weight gradient out; `backward_dw` computes it.
    save_original_input : bool, default False
        Keep the input itself for the backward, where another module keeps it anyway, instead of its
        FP8 copy. The numbers are the same.
    name : str, optional
        Name of the module for messages.

    Attributes
    ----------
    weight : Parameter
        [out_features, in_features] (unless split).
    bias : Parameter or Tensor
        [out_features]; an empty tensor where there is none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_parallel(
            tp_group, tp_size, parallel_mode, sequence_parallel=sequence_parallel,
            overlaps=(ub_overlap_ag, ub_overlap_rs), ub_name=ub_name,
            backward=(ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad),
            symmetric_ar_type=symmetric_ar_type,
        )  # fmt: skip
        gradients = (fuse_wgrad_accumulation, delay_wgrad_compute)
        self._begin(name, (bias, return_bias), gradients)
        rng = (get_rng_state_tracker, rng_tracker_name)
        self._set_linear(in_features, out_features, parameters_split, init_method, rng)
        self.save_original_input = bool(save_original_input)
        self._make_parameters(device_of(device), checked_dtype("Linear", params_dtype, dtype))
