# SPDX-License-Identifier: Apache-2.0
"""`CustomRecipe` in a module: the quantizers of its operands, as casts of its plans or stages.

A quantizer of this library is a row of the recipe table, and casts inside of the plan; so is a
`HybridQuantizer` whose parts are together one of these. Any other one is called at the stage that
would have cast (`_Outside`), and what it makes goes on dequantized.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.common.operand_casts import (
    OperandCast,
    Quantization,
    check_nvfp4,
    measuring_cast,
    nvfp4_options,
    overridden,
)
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
)
from transformer_engine.pytorch.execution.stages import StageBuffers
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

_ROLES = ("input", "weight", "grad_output")
_WEIGHT = _ROLES.index("weight")
_STAGES = ("quantize_input", "quantize_weight", "quantize_grad_output")
_CODES = {"e4m3": _core.DTYPE_E4M3, "e5m2": _core.DTYPE_E5M2}
_OF_ROWS = _core.CAST_ROW_SCALED
_OF_COLUMNS = _core.CAST_HADAMARD | _core.CAST_UNSIGNED
"""Options of a cast that change one of its forms alone."""


class _Resolved:
    """Recipe of a module under a `CustomRecipe`, which has been asked for its quantizers."""

    quantizations: tuple[Quantization, ...] = ()  # of each linear layer
    functions: Mapping[str, "_Outside"] = {}
    """The stages of quantizers that are called, by name."""
    weights: Mapping[int, Any] = {}
    """By part, quantizers of weights whose tensors are others than those of a cast of ours."""

    def _numerics(self) -> list[tuple[str, Any]]:
        # What it casts, not which function has said so: another may have its name or its address.
        made = ("quantizations", self.quantizations), ("functions", (*self.functions,))
        return [*super()._numerics(), *made]  # type: ignore[misc]


class ResolvedRecipe(_Resolved, CustomRecipe):
    """A recipe without state."""


class ResolvedDelayed(_Resolved, DelayedScaling):
    """One with roles under delayed scaling, which have its state."""


def of_parts(recipe: Recipe, quantization: Any, count: int) -> tuple[Quantization, ...]:
    """The quantization of each linear layer of a module."""
    found = getattr(recipe, "quantizations", None)
    return (quantization,) * count if found is None else found


def identity_of(recipe: Recipe) -> Any:
    """Identity of a module's recipe: text, or the casts of what quantizers ask for."""
    found = getattr(recipe, "quantizations", None)
    return repr(recipe) if found is None else (found, *recipe.functions)


def identity_of_all(recipes: Sequence[Recipe | None]) -> tuple:
    """Identity of the recipes of several modules, with the quantizers that are called."""
    return tuple([(repr(each), *getattr(each, "functions", {}).values()) for each in recipes])


def is_custom(recipe: Recipe | None) -> bool:
    """Return whether what a module follows comes from quantizers of the user."""
    return isinstance(recipe, _Resolved)


def name_of(recipe: Recipe) -> str:
    """The class of a recipe, as the user gave it."""
    return (CustomRecipe if is_custom(recipe) else type(recipe)).__name__


def calls_back(recipe: Recipe | None) -> bool:
    """Return whether a call under it runs functions of the program, or reads their tensors."""
    return isinstance(recipe, _Resolved) and bool(recipe.functions or recipe.weights)


# ---- weights that are kept quantized -------------------------------------------------------------


def weight_quantizer(recipe: Recipe, part: int) -> Any:
    """The quantizer of the function that makes a part's weight; None: that of its cast, or none."""
    return getattr(recipe, "weights", {}).get(part)


def keeping(quantizer: Any) -> Any:
    """Quantizer of a parameter, from a `weight_quantizer`; None where it keeps no tensor."""
    from transformer_engine.pytorch.tensor import IdentityQuantizer

    if isinstance(quantizer, IdentityQuantizer):
        return None
    made = quantizer.copy()
    made.internal = False
    made.set_usage(rowwise=True, columnwise=True)
    return made


def is_made_by(tensor: Any, quantizer: Any) -> bool:
    """Return whether a quantizer makes such tensors: of the same class, settings and formats."""
    like = quantizer.copy()
    like.internal = False
    like.set_usage(**tensor.get_usages())
    if type(tensor._quantizer) is not type(quantizer) or not any(tensor.get_usages().values()):
        return False
    made = like.make_empty(tensor.shape, dtype=tensor.dtype, device="meta")
    made = like._taken(made, "make_empty")
    return type(made) is type(tensor) and made._kind() == tensor._kind()


def functions_of(recipe: Any, weights: Sequence, parts: Sequence) -> dict[str, Callable]:
    """The stages of quantizers that are called, by name; None: no recipe.

    `weights` are those of a module as they are kept, `parts` the `operands.LinearTensors` of a
    call. A weight that is one tensor, and quantized already, is read by its stage.
    """
    return {
        name: stage.reading(weights[stage.part])
        if stage.role == _WEIGHT and len(parts[stage.part].weights) == 1
        else stage
        for name, stage in getattr(recipe, "functions", {}).items()
    }


# ---- casts and stages ----------------------------------------------------------------------------


def in_dtype(quantization: Quantization, output: int) -> Quantization:
    """The same with the dtype of the output for what quantizers make that are called."""
    casts = [
        cast._replace(dtype=output) if cast.recipe == _core.RECIPE_EXTERNAL else cast
        for cast in quantization.casts
    ]
    return Quantization(*casts, *quantization[3:])


def stages_of(quantization: Quantization) -> frozenset[int]:
    """The stages that quantizers run which are called, numbers of ``_core.LINEAR_STAGES``."""
    return frozenset(
        _core.LINEAR_STAGES.index(stage)
        for stage, cast in zip(_STAGES, quantization.casts, strict=True)
        if cast.recipe == _core.RECIPE_EXTERNAL
    )


def remembered(module: Any, recipe: Any, find: Callable[[], Recipe | None]) -> Recipe | None:
    """Recipe that a module follows under a `CustomRecipe`, found once by `find`."""
    # The function itself is compared and held: another may have its name, or its address.
    key, known = (recipe.qfactory, repr(recipe)), module.__dict__.get("_custom")
    if known is None or known[0] != key:
        known = module.__dict__["_custom"] = (key, find())
    return known[1]


def resolve(recipe: Recipe, kind: str, name: str | None, parts: Sequence[str]) -> Recipe | None:
    """Ask a `CustomRecipe` for the quantizers of a module; None where none of them casts.

    `kind` and `name` are of the module, `parts` the prefixes of its linear layers. ValueError
    where the function gives nothing, or requests that differ; TypeError where it gives no
    quantizer.
    """
    requests: list[DelayedScalingRequest] = []
    functions: dict[str, _Outside] = {}
    weights: dict[int, Any] = {}
    quantizations = []
    for part, prefix in enumerate(parts):
        casts = []
        for number, tensor in enumerate(_ROLES):
            role = role_of(name, prefix, tensor)
            given = ask(recipe, role, kind)
            if isinstance(given, DelayedScalingRequest):
                requests.append(given)
                cast = _delayed(given, tensor)
            else:
                cast = _native(given, tensor)
            if cast is None:
                cast = OperandCast(_core.RECIPE_EXTERNAL)
                functions[prefix + _STAGES[number]] = _Outside(given, number, part, prefix)
            if number == _WEIGHT and _makes_weights(given, cast):
                weights[part] = given
            casts.append(cast)
        check_nvfp4(f"{kind}: CustomRecipe", casts)
        found = Quantization(*casts, _core.LINEAR_FAST_OUTPUT)
        quantizations.append(overridden(found, recipe) if found.is_quantized else found)
    if not any(found.is_quantized for found in quantizations):
        return None
    made = _resolved(recipe, kind, requests)
    made.quantizations, made.functions, made.weights = tuple(quantizations), functions, weights
    return made


def role_of(name: str | None, prefix: str, tensor: str) -> QuantizerRole:
    """The role of a tensor of a linear layer with a prefix, in a module of this name."""
    names = [text for text in (name, prefix.rstrip("_")) if text]
    return QuantizerRole("linear", tensor, ".".join(names))


def ask(recipe: Any, role: QuantizerRole, kind: str) -> Any:
    """Call the function of a recipe for a role of a module of a kind; raises as `resolve`."""
    from transformer_engine.pytorch.tensor.quantizer import Quantizer

    where, given = f"{kind}: CustomRecipe.qfactory({role})", recipe.qfactory(role)
    if given is None:
        raise ValueError(
            f"{where} gave None, expected a quantizer: IdentityQuantizer() leaves the role in high "
            "precision"
        )
    if isinstance(given, QuantizerRequest) and not isinstance(given, DelayedScalingRequest):
        raise NotImplementedError(
            f"{where} gave a {type(given).__name__}: of requests only DelayedScalingRequest is "
            "built"
        )
    if not isinstance(given, Quantizer | QuantizerRequest):
        raise TypeError(f"{where} gave a {type(given).__name__}, expected a quantizer or a request")
    return given


def _resolved(recipe: Any, kind: str, requests: list[DelayedScalingRequest]) -> Any:
    """The recipe that has the state of these requests."""
    if not requests:
        return ResolvedRecipe(recipe.qfactory, backward_override=recipe.backward_override)
    settings = vars(common_request(kind, requests))
    return ResolvedDelayed(**settings, backward_override=recipe.backward_override)


def common_request(kind: str, requests: list[DelayedScalingRequest]) -> DelayedScalingRequest:
    """The one that all of a module are; ValueError where they differ."""
    if any(request != requests[0] for request in requests):
        raise ValueError(
            f"{kind}: CustomRecipe.qfactory gave requests that differ: {requests}; all requests of "
            "a module must be the same"
        )
    return requests[0]


def _delayed(request: DelayedScalingRequest, tensor: str) -> OperandCast:
    direction = "bwd" if tensor == "grad_output" else "fwd"
    return OperandCast(_core.RECIPE_DELAYED, _CODES[request.fp8_format.dtype_name(direction)])


def _makes_weights(given: Any, cast: OperandCast) -> bool:
    """Return whether a quantizer makes weights of its own: one that is called, or of two forms."""
    from transformer_engine.pytorch.tensor import HybridQuantizer

    if type(given) is HybridQuantizer:
        return cast.recipe != _core.RECIPE_NONE
    return cast.recipe == _core.RECIPE_EXTERNAL


def _of_both(quantizer: Any, tensor: str) -> OperandCast | None:
    """The cast that makes both forms as the parts of a `HybridQuantizer` do; None: there is none.

    The parts differ at most in options that their own form has not.
    """
    row = _native(quantizer.rowwise_quantizer, tensor)
    column = _native(quantizer.columnwise_quantizer, tensor)
    if row is None or column is None or quantizer.columnwise_source != "original":
        return None
    of_rows, of_columns = row.options & ~_OF_COLUMNS, column.options & ~_OF_ROWS
    if row._replace(options=of_rows & ~_OF_ROWS) != column._replace(
        options=of_columns & ~_OF_COLUMNS
    ):
        return None
    return row._replace(options=of_rows | of_columns)


def _native(quantizer: Any, tensor: str) -> OperandCast | None:
    """How plans cast as a quantizer does; None where it has to be called."""
    from transformer_engine.pytorch import tensor as formats
    from transformer_engine.pytorch.tensor.casts import code_of

    kind = type(quantizer)
    if kind is formats.HybridQuantizer:
        return _of_both(quantizer, tensor)
    if kind is formats.IdentityQuantizer:
        return OperandCast() if quantizer.dtype is None else None
    if getattr(quantizer, "with_amax_reduction", False):
        return None
    if kind is formats.NVFP4Quantizer:
        if quantizer.stochastic_rounding and tensor != "grad_output":
            return None
        options = nvfp4_options(
            tiles_2d=quantizer.with_2d_quantization,
            hadamard=quantizer.with_rht,
            signed=quantizer.with_random_sign_mask,
            stochastic=quantizer.stochastic_rounding,
            four_over_six=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
            to_256=quantizer.nvfp4_e4m3_max == 256,
            row_scaled=quantizer.row_scaled_nvfp4,
        )
        return OperandCast(_core.RECIPE_NVFP4, _core.DTYPE_U8, options=options)
    if kind is formats.MXFP8Quantizer:
        squares = _core.CAST_TILES_2D if quantizer.with_2d_quantization else 0
        code = code_of(quantizer.dtype)
        return OperandCast(_core.RECIPE_MXFP8, code, 0.0, squares, quantizer.margin)
    recipes = {
        formats.Float8CurrentScalingQuantizer: _core.RECIPE_CURRENT,
        formats.Float8BlockQuantizer: _core.RECIPE_BLOCK,
        formats.Float8RowQuantizer: _core.RECIPE_ROW,
    }
    if kind not in recipes:
        return None
    tiles_2d = getattr(quantizer, "block_scaling_dim", 1) == 2
    how = quantizer.force_pow_2_scales, tiles_2d, quantizer.amax_epsilon
    return measuring_cast(recipes[kind], code_of(quantizer.dtype), *how)


class _Outside:
    """A quantizer at its stage: what it makes of a tensor, dequantized.

    `given` is made by it already, and is not cast again.
    """

    def __init__(
        self, quantizer: Any, role: int, part: int, prefix: str, given: Any = None
    ) -> None:
        self.quantizer, self.role, self.part, self.prefix = quantizer, role, part, prefix
        self.stage, self.given = prefix + _STAGES[role], given

    def reading(self, weight: Any) -> "_Outside":
        """The stage for a weight, which is `given` where it is quantized."""
        if not is_quantized(weight):
            return self
        return _Outside(self.quantizer, self.role, self.part, self.prefix, weight.detach())

    def __call__(self, buffers: StageBuffers) -> None:
        """Write the forms that GEMMs of the plan read."""
        stage = next(s for s in buffers.plan.stages if s.name == self.stage)
        operand = stage.node * _core.OPERAND_ROLES + self.role
        row, column = buffers.linked("row", operand), buffers.linked("column", operand)
        with torch.no_grad():
            made = self._made(buffers, stage, row is not None, column is not None)
            if row is not None:
                self._put(made, row)
            if column is not None:
                self._put(_column_wise(made), column)

    def _put(self, made: Any, place: torch.Tensor) -> None:
        values = made.dequantize(dtype=place.dtype)
        if values.shape != place.shape:
            raise ValueError(
                f"{type(self.quantizer).__name__}: what it made has the shape "
                f"{tuple(values.shape)}, expected {tuple(place.shape)}"
            )
        place.copy_(values)

    def _made(self, buffers: StageBuffers, stage: Any, row: bool, column: bool) -> Any:
        """The quantized tensor, of these forms at least; RuntimeError where one was dropped."""
        if self.given is None:
            source = buffers.lend(stage.buffers[0])
            self.quantizer.set_usage(rowwise=row, columnwise=column)
            return self.quantizer.quantize(source.reshape(-1, source.shape[-1]))
        there = self.given.get_usages()
        apart = getattr(self.given, "_CAST_APART", False)
        for form, wanted in (("rowwise", row), ("columnwise", column and apart)):
            if wanted and not there[form]:
                raise RuntimeError(
                    f"{type(self.given).__name__}: a GEMM reads its {form} form, which was dropped"
                )
        return self.given


def _column_wise(made: Any) -> Any:
    """The column-wise form alone, where it is a cast by itself: it stands for other values.

    That of transformed values can not be multiplied out: it stands for those of the row-wise one.
    """
    if not getattr(made, "_CAST_APART", False):
        return made
    if not all(made.get_usages().values()) or getattr(made, "_with_rht", False):
        return made
    if getattr(getattr(made, "_columnwise_storage", None), "_with_rht", False):
        raise NotImplementedError(
            "HybridQuantizer: columnwise_quantizer=NVFP4Quantizer(with_rht=True): transformed "
            "values can not be multiplied with values that are not transformed: give with_rht=False"
        )
    made = made.detach()
    made.update_usage(rowwise_usage=False)
    return made
