# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam`: Adam in one pass of the C library, with state of the dtypes that are asked for.

Beside the arithmetic there is what training programs rely on: masters beside 16-bit and quantized
parameters, gradients under ``decoupled_grad``, and the step counted by group. Every update goes
through `multi_tensor_applier` of this module, which programs replace.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.optimizers.checks import (
    DIRECT,
    DTYPES,
    check_adam,
    check_beginning,
    check_decoupled,
    check_dense,
    check_parameter,
    check_states,
)
from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier
from transformer_engine.pytorch.optimizers.multi_tensor_step import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_cast,
    multi_tensor_adam_param_remainder,
)
from transformer_engine.pytorch.optimizers.quantized_updates import Updates
from transformer_engine.pytorch.optimizers.updates import local_part, wide_copy
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.torchside.device import is_capturing
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

__getattr__, __dir__ = absent.attach(globals())

_NAME = "FusedAdam"
_PATH = "pytorch.optimizers.FusedAdam"
_CHUNK = 1024
"""Tensors of one call."""
_F16_TOP = 65504.0 / 2
_E4M3_TOP = 448.0


_COPIED = (
    "_dummy_overflow_buf", "_grad_none", "_scales", "_step_supports_amp_scaling", "adam_w_mode",
    "capturable", "master_weights", "name_to_dtype_map", "store_param_remainders",
    "use_decoupled_grad",
)  # fmt: skip
"""Attributes of an optimizer, beside torch's, that its copies have."""


class _Row:
    """Tensors of one parameter that a step updates. Between steps it holds no states."""

    __slots__ = (
        "again", "dtype", "extra", "kept", "kind", "master", "mean", "param", "square", "type",
        "value",
    )  # fmt: skip

    def __init__(self, param: Tensor, kept: Any, casts: bool) -> None:
        self.param, self.type, self.dtype = param, type(param), param.dtype
        self.kept = kept  # dtype of its master or remainders, None without
        self.again = True  # whether steps find it again: it has states as they are kept
        self.kind = param.device, casts, None if casts or kept is None else kept is torch.int16

    def takes(self, param: Tensor, state: dict) -> bool:
        """Take the states of a parameter; False where it, or they, are of another form now."""
        self.mean, self.square = state.get("exp_avg"), state.get("exp_avg_sq")
        self.master = master = state.get("master_param")
        self.value, self.extra = param, None  # what is updated, and what goes with it
        if master is not None:
            if self.kind[2]:
                self.extra = master
            else:
                self.value, self.extra = master, None if self.kind[1] else param
        return (
            self.param is param
            and self.type is type(param)
            and self.dtype is param.dtype
            and self.kept is (None if master is None else master.dtype)
            and param.device == self.kind[0]
            and self.mean is not None
            and self.square is not None
        )


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW, computed in fp32.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        fp32, fp16 or bf16, quantized ones too; as of `torch.optim.Optimizer`.
    lr : float, default 1e-3
        Learning rate.
    betas : (float, float), default (0.9, 0.999)
        Decay of the mean of gradients and of their squares.
    eps : float, default 1e-8
        Added to the root of the mean of squares.
    weight_decay : float, default 0
        Weight decay.
    amsgrad : bool, default False
        Not there.
    bias_correction : bool, default True
        Divide the means by 1 - beta^step.
    adam_w_mode : bool, default True
        Weight decay apart from the gradient (AdamW); else added to it (L2 regularization).
    capturable : bool, default False
        Learning rate and step are tensors on the device, so that a CUDA graph may have the step;
        gradients are unscaled by a grad scaler in the update. Parameters are on one device.
    master_weights : bool, default False
        Keep a copy of 16-bit and of quantized parameters as state ``master_param``, and update
        that.
    master_weight_dtype : torch.dtype, optional
        Of the copies: fp32 (default, and None), fp16 (with a scale) or bf16.
    exp_avg_dtype, exp_avg_sq_dtype : torch.dtype, default torch.float32
        Of the means: fp32, bf16, fp16 (with a scale) or uint8 (FP8 E4M3 with a scale).
    use_decoupled_grad : bool, default False
        Read gradients from ``parameter.decoupled_grad``, which may have another dtype.
    store_param_remainders : bool, default False
        Of an fp32 copy of a bf16 parameter keep only the 16 bits that the parameter lacks, int16.
    set_grad_none : bool, optional
        Older name of the argument of `zero_grad`.

    Raises
    ------
    ValueError
        A number or a dtype that can not be.
    RuntimeError
        Options that exclude each other, ``amsgrad``.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | None = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise absent.refusal(_PATH, "(amsgrad=True)")
        dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype or torch.float32,
        }
        check_states(dtypes, capturable, bool(master_weights), store_param_remainders)
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults["weight_decay"] = weight_decay
        check_adam(_NAME, defaults)
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.name_to_dtype_map = dtypes
        self.store_param_remainders = (
            store_param_remainders
            and bool(master_weights)
            and dtypes["master_param"] is torch.float32
        )
        self._step_supports_amp_scaling = capturable
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self._rows: dict[int, _Row] = {}  # by parameter: those that only depend on its states
        device = next((p.device for p in self._parameters_of_groups()), torch.device("cpu"))
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
        self._grad_none = True if set_grad_none is None else bool(set_grad_none)
        for group in self.param_groups if capturable else ():
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)

    def __getstate__(self) -> dict:
        """State for copies and pickles: torch's, and that of this class."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._rows = {}

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with numbers of their own; raises as the class does."""
        check_adam(_NAME, param_group)
        super().add_param_group(param_group)

    # ---- gradients and state ---------------------------------------------------------------------

    def _grad_of(self, parameter: Tensor) -> Tensor | None:
        if self.use_decoupled_grad:
            return getattr(parameter, "decoupled_grad", None)
        return parameter.grad

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients that `step` reads, or fill them with 0.

        `set_to_none` None: what ``set_grad_none`` said, or True.
        """
        forget = self._grad_none if set_to_none is None else set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=forget)
            return
        for parameter in self._parameters_of_groups():
            grad = self._grad_of(parameter)
            if grad is not None and forget:
                parameter.decoupled_grad = None
            elif grad is not None:
                grad.zero_()

    def _parameters_of_groups(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _has_master(self, parameter: Tensor) -> bool:
        wide = parameter.dtype is torch.float32 and not is_quantized(local_part(parameter))
        return bool(self.master_weights) and not wide

    def _initialize_state(
        self,
        param: Tensor,
        state_name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        """Make one state of a parameter, of 0 where `zero_buffer` says so.

        `store_param_remainders`: it is the int16 remainders.
        """
        dtype = self.name_to_dtype_map[state_name]
        like = wide_copy(param) if is_quantized(local_part(param)) else param.detach()
        if store_param_remainders:
            made = torch.zeros_like(like, dtype=torch.int16)
        elif dtype is torch.uint8:
            one = torch.ones(1, dtype=torch.float32, device=param.device)
            quantizer = Float8Quantizer(one, torch.zeros_like(one), DType.kFloat8E4M3)
            quantizer.set_usage(columnwise=False)
            made = quantizer.quantize(torch.zeros_like(like, dtype=torch.float32))
        elif zero_buffer:
            made = torch.zeros_like(like, dtype=dtype)
        else:
            made = torch.empty_like(like, dtype=dtype)
        self.state[param][state_name] = made
        if dtype is not torch.float32:
            one = torch.ones(1, dtype=torch.float32, device=param.device)
            self._scales.setdefault(param, {})[state_name] = one

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Give a parameter its first state: means of 0 and, with masters, a copy.

        It is one of the groups'; `store_param_remainders` None: as the optimizer was told.
        """
        for name in ("exp_avg", "exp_avg_sq"):
            self._initialize_state(param, name, zero_buffer=True)
        if self._has_master(param):
            self._initialize_master(param, store_param_remainders)

    def _initialize_master(self, param: Tensor, stores: bool | None = None) -> None:
        if stores is None:
            plain = param.dtype is torch.bfloat16 and not is_quantized(local_part(param))
            stores = self.store_param_remainders and plain
        self._initialize_state(param, "master_param", False, stores)
        if not stores:
            self.set_scaled_state(param, "master_param", wide_copy(param))

    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """State of a parameter in fp32, by its name; remainders are int16.

        `skip_unscale`: a bf16 state is returned as it is.
        """
        state = self.state[param][state_name]
        dtype = self.name_to_dtype_map[state_name]
        if state.dtype in (torch.int16, torch.float32) and dtype is not torch.uint8:
            return state
        if dtype is torch.uint8:
            return state.dequantize(dtype=torch.float32)
        if dtype is torch.bfloat16:
            return state if skip_unscale else state.float()
        return state.float() * self._scales[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Take over a state of a parameter, given in fp32, or as int16 remainders."""
        if state_name not in self.state[param]:
            self.initialize_state(param)
        state, dtype = self.state[param][state_name], self.name_to_dtype_map[state_name]
        if dtype not in (torch.float16, torch.uint8) or state.dtype is torch.int16:
            state.copy_(unscaled_state)
            return
        wide = unscaled_state.float()
        top = wide.abs().max().reshape(1) if wide.numel() > 0 else wide.new_zeros(1)
        if dtype is torch.float16:
            scale = self._scales[param][state_name].copy_(top / _F16_TOP)
            state.copy_(torch.where(scale > 0, wide * scale.reciprocal(), 0.0))
        else:
            scale = torch.where(top > 0, _E4M3_TOP / top, 1.0)
            state._quantizer.scale.copy_(scale)
            state.quantize_(wide)
            self._scales[param][state_name].copy_(scale.reciprocal())

    def state_dict(self) -> dict:
        """As of `torch.optim.Optimizer`, states in fp32 (remainders int16) and without scales."""
        saved = super().state_dict()
        packed = [key for group in saved["param_groups"] for key in group["params"]]
        for key, param in zip(packed, self._parameters_of_groups(), strict=True):
            if key in saved["state"]:
                saved["state"][key] = {
                    name: self.get_unscaled_state(param, name)
                    if name in self.name_to_dtype_map
                    else value
                    for name, value in saved["state"][key].items()
                }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` gave, or the state of another AdamW.

        States get the dtypes of this optimizer. Where groups have no step, it is that of their
        parameters.
        """
        bare = {**state_dict, "state": {}}  # torch would cast states to the parameters' dtypes
        super().load_state_dict(bare)
        self._scales.clear()
        groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
        for saved, group in groups:
            steps = []
            for key, param in zip(saved["params"], group["params"], strict=True):
                found = state_dict["state"].get(key)
                if found is None:
                    continue
                self._load(param, found)
                if "step" in found:
                    steps.append(int(found["step"]))
            if "step" not in group and steps:
                group["step"] = max(steps)
            if self.capturable:
                device = self._dummy_overflow_buf.device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
                if "step" in group:
                    count = torch.as_tensor(group["step"], dtype=torch.int32, device=device)
                    group["step"] = count.reshape(1)

    def _load(self, param: Tensor, found: dict) -> None:
        self.state[param] = {}
        self.initialize_state(param)
        for name in self.state[param]:
            value = found.get(name)
            if value is None:
                continue
            kept = self.state[param][name]
            if (value.dtype is torch.int16) != (kept.dtype is torch.int16):
                raise ValueError(
                    f"{_NAME}.load_state_dict: {name} of {value.dtype}, here it is {kept.dtype}: "
                    "set store_param_remainders as in the optimizer that saved the state"
                )
            self.set_scaled_state(param, name, value.to(param.device))

    # ---- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable | None = None, grad_scaler: Any = None) -> Any:
        """Take one step; return what `closure` did, which computes loss and gradients again.

        `grad_scaler`, a `torch.amp.GradScaler`, is for capturable optimizers: the update unscales
        gradients, and does nothing where one is Inf or NaN. TypeError for a parameter or a gradient
        that is sparse, or of another dtype, with nothing changed; RuntimeError for a scaler, or the
        capture of a CUDA graph, without ``capturable``.
        """
        if grad_scaler is not None and not self.capturable:
            raise RuntimeError(
                f"{_NAME}.step: grad_scaler={grad_scaler!r} and capturable=False: call "
                "grad_scaler.step(optimizer), or set capturable=True"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fixed = not self.capturable and is_capturing(self._dummy_overflow_buf.device)
        if fixed and any(group["bias_correction"] for group in self.param_groups):
            raise RuntimeError(
                f"{_NAME}.step: a CUDA graph is captured and capturable=False: every replay "
                "would correct the bias for this one step: set capturable=True"
            )
        ready = self._ready(grad_scaler is not None)  # what can not be updated raises there
        found = None if grad_scaler is None else grad_scaler._check_inf_per_device(self)
        for group in self.param_groups:
            self._count(group)
        inverse = self._unscaling(grad_scaler, found) if self.capturable else None
        for group, (rows, grads, new) in zip(self.param_groups, ready, strict=True):
            for i in new:
                rows[i] = self._row(rows[i])
            self._update(group, rows, grads, inverse)
        self._forget_rows()
        return loss

    def _ready(self, scaled: bool) -> list[tuple[list, list[Tensor], list[int]]]:
        """(rows, gradients, places of rows still to be made: there are parameters) of each group.

        Such rows may hold copies of states, so they are made group by group. `scaled`: gradients
        are multiplied in place by the update; where several parameters have one, all but the first
        read copies.
        """
        found, seen, beginning, decoupled = [], set(), [], self.use_decoupled_grad
        for group in self.param_groups:
            rows, grads, new = [], [], []
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    check_beginning(_NAME, param.device)
                    beginning.append(param)
                grad = self._grad_of(param)
                if grad is None:
                    continue
                if grad.dtype not in DTYPES or grad.layout is not torch.strided:
                    check_dense(_NAME, "gradient", grad)
                row = self._rows.get(id(param))
                if row is None or not state or not row.takes(param, state):
                    check_parameter(_NAME, param)
                    own = local_part(param)
                    if own.numel() == 0 and not is_quantized(own):
                        continue  # of a weight that ranks share a cast may be one of all of them
                    new.append(len(rows))
                    row = param
                if decoupled:
                    check_decoupled(_NAME, param, grad)
                if scaled:
                    address = local_part(grad).data_ptr()
                    grad = grad.clone() if address in seen else grad
                    seen.add(address)
                rows.append(row)
                grads.append(grad)
            found.append((rows, grads, new))
        for param in beginning:
            self.initialize_state(param)
        return found

    def _forget_rows(self) -> None:
        """Let go of parameters that are in no group any more."""
        if len(self._rows) > sum(len(group["params"]) for group in self.param_groups):
            known = {id(param) for param in self._parameters_of_groups()}
            self._rows = {key: row for key, row in self._rows.items() if key in known}

    def _count(self, group: dict) -> None:
        """Count the step of a group; on the device, those that the last flag did not stop."""
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
        elif "step" not in group:
            check_beginning(_NAME, self._dummy_overflow_buf.device)
            group["step"] = torch.ones_like(self._dummy_overflow_buf)
        else:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int32)

    def _unscaling(self, grad_scaler: Any, found: dict | None) -> Tensor:
        """Return the factor of the gradients; set the flag where `found` says Inf or NaN."""
        flag = self._dummy_overflow_buf
        if found is None:
            flag.zero_()
            return torch.ones(1, dtype=torch.float32, device=flag.device)
        flag.copy_(found[flag.device])
        scale = grad_scaler._get_scale_async()
        return scale.double().reciprocal().float().reshape(1).to(flag.device)

    def _row(self, param: Tensor) -> _Row:
        """Return the `Update` of a parameter, kept for later steps."""
        state = self.state[param]
        quantized = is_quantized(local_part(param))
        if self._has_master(param) and "master_param" not in state:  # the parameter was fp32 before
            self._initialize_master(param)
        master = state.get("master_param")
        row = _Row(param, None if master is None else master.dtype, quantized)
        if not row.takes(param, state):
            raise RuntimeError(
                f"{_NAME}: the state of a parameter has {sorted(state)}, expected exp_avg and "
                "exp_avg_sq: empty it, so that the step begins it anew"
            )
        expanded = [  # a step updates copies of these in fp32
            name
            for name, kept in state.items()
            if self.name_to_dtype_map.get(name, torch.float32) not in DIRECT
            and kept.dtype is not torch.int16
        ]
        if "exp_avg" in expanded:
            row.mean = self.get_unscaled_state(param, "exp_avg")
        if "exp_avg_sq" in expanded:
            row.square = self.get_unscaled_state(param, "exp_avg_sq")
        if "master_param" in expanded:
            row.value = self.get_unscaled_state(param, "master_param")
        elif quantized and master is None:
            row.value = wide_copy(param)
        row.again = not expanded and not (quantized and master is None)
        if row.again:
            self._rows[id(param)] = row
        else:
            self._rows.pop(id(param), None)
        return row

    def _update(self, group: dict, rows: list[_Row], grads: list, inverse: Tensor | None) -> None:
        kinds: dict[tuple, tuple[list[_Row], list[Tensor]]] = {}
        for row, grad in zip(rows, grads, strict=True):
            chosen = kinds.get(row.kind)
            if chosen is None:
                chosen = kinds[row.kind] = ([], [])
            chosen[0].append(row)
            chosen[1].append(grad)
        tail = () if inverse is None else (inverse,)
        numbers = (
            group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode,
            int(bool(group["bias_correction"])), group["weight_decay"], *tail,
        )  # fmt: skip
        for (device, casts, has_remainders), (chosen, given) in kinds.items():
            flag = self._dummy_overflow_buf
            flag = flag if flag.device == device else flag.to(device)
            if casts:
                _update_and_cast(chosen, given, flag, numbers, self.capturable)
            else:
                self._update_lists(has_remainders, chosen, given, flag, numbers)
            for row in chosen:
                if row.again:
                    row.mean = row.square = row.master = row.value = row.extra = None
                else:
                    self._keep(row)

    def _update_lists(
        self,
        has_remainders: bool | None,
        rows: list[_Row],
        grads: list,
        flag: Tensor,
        numbers: tuple,
    ) -> None:
        """Update parameters that are not quantized; `has_remainders` None: without masters."""
        op: Callable = multi_tensor_adam
        if self.capturable:
            op = multi_tensor_adam_capturable
            op = op if has_remainders is None else multi_tensor_adam_capturable_master
        elif has_remainders:
            op = multi_tensor_adam_param_remainder
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            lists = [
                grads[first : first + _CHUNK],
                [row.value if has_remainders is not False else row.extra for row in part],
                [row.mean for row in part],
                [row.square for row in part],
            ]
            if has_remainders is not None:
                lists.append([row.extra if has_remainders else row.value for row in part])
            multi_tensor_applier(op, flag, lists, *numbers)

    def _keep(self, row: _Row) -> None:
        """Scale states that were expanded."""
        states = {"exp_avg": row.mean, "exp_avg_sq": row.square}
        if row.master is not None and row.master.dtype is not torch.int16:
            states["master_param"] = row.value
        for name, value in states.items():
            if self.name_to_dtype_map[name] not in DIRECT:
                self.set_scaled_state(row.param, name, value)


def _update_and_cast(
    rows: list[_Row], grads: list, flag: Tensor, numbers: tuple, capturable: bool
) -> None:
    """Update quantized parameters."""

    def apply(op: Callable, lists: list, *more: Any) -> Any:
        return multi_tensor_applier(op, flag, lists, *numbers, *more)

    op = multi_tensor_adam_capturable if capturable else multi_tensor_adam
    updates = Updates(apply, op, multi_tensor_adam_cast, flag if capturable else None)
    for row, grad in zip(rows, grads, strict=True):
        updates.add(row.param, (grad, row.value, row.mean, row.square))
    if not capturable:
        updates.flush_by_fp8()
    updates.flush()
