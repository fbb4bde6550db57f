# SPDX-License-Identifier: Apache-2.0
"""Recipes: which low-precision formats are used and how their scales are found.

A recipe is a plain, mutable dataclass. Every field has a rule that runs whenever the field is
written, in the constructor and later, so that a recipe is valid at any time and the code that uses
it need not check again. `repr` shows everything that changes numerics and is therefore the
identity of a recipe: modules whose recipes print alike share their amax bookkeeping.

Two habits of client programs shape this file. They pass keyword arguments that recipes no longer
have (`_accept_unknown_arguments`). And they unpickle recipes through allow-lists of class names, so
the pickle of a recipe must name this module's public classes only.

Recipes that are not built yet can be imported and made, since programs do so whether they use them
or not; `autocast` and the modules refuse them (`common.absent`). Which recipes work is asked with
``te.is_mxfp8_available()``, its siblings and ``check_*_support()`` of `pytorch.quantization`, never
with ``hasattr``.
"""

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from transformer_engine.common import absent, config
from transformer_engine.common import recipe_rules as rules

__all__ = [
    "DelayedScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "QParams",
    "Recipe",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())

# Largest finite value of each element type.
_LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
_DTYPE_OF_LARGEST = {largest: dtype for dtype, largest in _LARGEST.items()}


class _FormatHelper(NamedTuple):
    """Largest finite value of the forward's and of the backward's element type."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element types of a recipe.

    The forward type is that of activations and weights, the backward type that of their gradients.
    `HYBRID` gives the forward the precision of E4M3 and the gradients the range of E5M2.
    """

    E2M1 = _FormatHelper(_LARGEST["e2m1"], _LARGEST["e2m1"])
    E4M3 = _FormatHelper(_LARGEST["e4m3"], _LARGEST["e4m3"])
    E5M2 = _FormatHelper(_LARGEST["e5m2"], _LARGEST["e5m2"])
    HYBRID = _FormatHelper(_LARGEST["e4m3"], _LARGEST["e5m2"])

    def fp8_max(self, direction: str) -> float:
        """Return the largest finite value of a direction's element type.

        The direction is "fwd" (activations, weights) or "bwd" (gradients); ValueError for another
        one.
        """
        if direction == "fwd":
            return self.value.max_fwd
        if direction == "bwd":
            return self.value.max_bwd
        raise ValueError(f"direction must be 'fwd' or 'bwd', got {direction!r}")

    def dtype_name(self, direction: str) -> str:
        """Return the name of a direction's element type: "e4m3", "e5m2" or "e2m1"; as `fp8_max`."""
        return _DTYPE_OF_LARGEST[self.fp8_max(direction)]

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickle by value; some releases of Python would name the builtin `getattr` instead."""
        return Format, (self.value,)


# --- Rules of what is defined here; `recipe_rules` has the others, and says what a rule is.


def _fp8_format(where: str, value: Any) -> Format:
    """Accept E4M3 and HYBRID; AssertionError for the other formats, ValueError for other things."""
    if not isinstance(value, Format):
        fix = "Format.HYBRID or Format.E4M3"
        if isinstance(value, str) and value.upper() in Format.__members__:
            fix = f"Format.{value.upper()} (from transformer_engine.common.recipe import Format)"
        raise ValueError(f"{where} must be a Format, got {value!r}; pass {fix}")
    if value not in (Format.E4M3, Format.HYBRID):
        raise AssertionError(
            f"{where}={value} is not supported: pass Format.HYBRID (E4M3 forward, E5M2 gradients) "
            "or Format.E4M3"
        )
    return value


def _fp8_qparams(where: str, value: Any) -> "QParams":
    """Accept a QParams that asks for nothing that exists in FP4 only."""
    value = rules.instance(QParams)(where, value)
    for name in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
        if getattr(value, name):
            raise ValueError(f"{where} has {name}=True, which exists for NVFP4 only")
    return value


@dataclass(frozen=True)
class MMParams:
    """How one kind of GEMM runs.

    Parameters
    ----------
    use_split_accumulator : bool, default True
        Add partial sums to an fp32 accumulator at short intervals: more exact. False is fast
        accumulation: more of the sum stays in the tensor core's narrower accumulator. ValueError
        for what is no bool.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        where = "MMParams.use_split_accumulator"
        object.__setattr__(
            self, "use_split_accumulator", rules.boolean(where, self.use_split_accumulator)
        )


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized.

    Parameters
    ----------
    power_2_scale : bool, default False
        Round scales down to powers of two.
    amax_epsilon : float, default 0.0
        Smallest amax that a scale is computed from, in the units of the tensor.
    random_hadamard_transform : bool, default False
        Mix groups of 16 values before the cast (NVFP4 only).
    stochastic_rounding : bool, default False
        Round up or down with a probability given by the distance (NVFP4 only).
    fp4_2d_quantization : bool, default False
        One scale per 16 x 16 tile (NVFP4 only).

    Raises
    ------
    ValueError
        A switch is no bool; `amax_epsilon` is negative, not finite or no number.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name != "amax_epsilon":
                value = rules.boolean(f"QParams.{f.name}", getattr(self, f.name))
                object.__setattr__(self, f.name, value)
        try:
            epsilon = math.fabs(self.amax_epsilon)  # fabs: -0.0 and 0.0 print differently
        except (TypeError, ValueError):
            epsilon = math.nan
        if not (epsilon == self.amax_epsilon and math.isfinite(epsilon)):
            raise ValueError(
                "QParams.amax_epsilon must be a finite number of at least 0, got "
                f"{self.amax_epsilon!r}"
            )
        object.__setattr__(self, "amax_epsilon", epsilon)


def _from_environment(variable: config.Variable) -> Any:
    """Make a field whose default is read from the environment when a recipe is constructed."""
    return field(default_factory=variable.get, metadata={"variable": variable})


def _default_when_unpickled(f: Field) -> Any:
    """Return the default of a field that a pickle lacks, whatever the environment says by now."""
    if "variable" in f.metadata:
        return f.metadata["variable"].default
    return f.default if f.default_factory is MISSING else f.default_factory()


def _text(value: Any) -> str:
    """Return what stands for a field's value in `repr`: the same text for the same numerics."""
    if isinstance(value, Format):
        return str(value)
    return _callable_text(value) if callable(value) else repr(value)


def _callable_text(function: Callable) -> str:
    """Name a callable: where it can be imported from, or its name and an address.

    The address is that of the callable, or of the object that a method is bound to: asking twice
    for a bound method gives two objects. It is unique as long as a recipe holds the callable.
    """
    is_method = inspect.ismethod(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    found: Any = sys.modules.get(named.__module__ or "")
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is function or (is_method and inspect.ismethod(found) and found == function):
        return f"<{name}>"
    return f"<{name} at {id(function.__self__ if is_method else function):#x}>"


# Keyword arguments that existing programs pass to every version: dropped in silence,
# because the user of such a program could not act on a warning.
_IGNORED_ARGUMENTS = frozenset(
    {"backend", "device", "interval", "opt_level", "override_linear_precision", "params_dtype"}
)


def _accept_unknown_arguments(cls: type) -> type:
    """Let the constructor of a recipe (class decorator) ignore keyword arguments it does not have.

    An argument that is not known to come from an existing program gives a UserWarning that names
    it, since it may be a misspelt field.
    """
    strict = cls.__init__
    known = frozenset(f.name for f in fields(cls) if f.init)

    @functools.wraps(strict)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name not in known]:
            del kwargs[name]
            if name not in _IGNORED_ARGUMENTS:
                warnings.warn(
                    f"{type(self).__name__} has no argument {name!r}: it is ignored. Its arguments "
                    f"are {', '.join(f.name for f in fields(cls) if f.init)}",
                    UserWarning,
                    stacklevel=2,
                )
        strict(self, *args, **kwargs)
        self._renew_repr()

    cls.__init__ = __init__
    return cls


@dataclass(repr=False, eq=False)
class Recipe:
    """Base of all recipes.

    The class methods tell recipes apart, on a class or an instance. Two recipes are equal if they
    have one class and the same numerics. Recipes can be written to and are therefore not hashable:
    `repr` is the key to use.

    A subclass lists its fields' rules in `_RULES`; a rule takes a name for messages and a value,
    and returns the value to store or raises.
    """

    _RULES: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from the amaxes of earlier steps."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether FP8 tensors have one scale each, from their own amax."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether FP8 tensors have one scale each, delayed or current."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether FP8 tensors have a scale per 1 x 128 or 128 x 128 tile."""
        return issubclass(cls, absent.stand_in(__name__, "Float8BlockScaling"))

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether FP8 tensors have a power-of-two scale per 32 values."""
        return issubclass(cls, absent.stand_in(__name__, "MXFP8BlockScaling"))

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether FP4 tensors have a scale per 16 values."""
        return issubclass(cls, absent.stand_in(__name__, "NVFP4BlockScaling"))

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers come from a function of the user."""
        return issubclass(cls, absent.stand_in(__name__, "CustomRecipe"))

    def _numerics(self) -> list[tuple[str, Any]]:
        """Return everything that changes numerics, as (name, value)."""
        # A subclass may call this class's constructor before it sets fields of its own.
        return [(f.name, getattr(self, f.name, None)) for f in fields(self)]

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a field's new value, store it and renew the `repr`."""
        rule = self._RULES.get(name)
        if rule is not None:
            value = rule(f"{type(self).__name__}.{name}", value)
        object.__setattr__(self, name, value)
        if "_repr_text" in self.__dict__:  # not while the constructor runs
            self._renew_repr()

    def __delattr__(self, name: str) -> None:
        """Delete an attribute that is no field, and renew the `repr`."""
        if any(f.name == name for f in fields(self)):
            raise AttributeError(f"field {name!r} of {type(self).__name__} can not be deleted")
        object.__delattr__(self, name)
        self._renew_repr()

    def __repr__(self) -> str:
        """Return the class and everything that changes numerics, kept until the next write."""
        text = self.__dict__.get("_repr_text")
        if text is None:
            pairs = ", ".join(f"{name}={_text(value)}" for name, value in self._numerics())
            text = f"{type(self).__qualname__}({pairs})"
            self.__dict__["_repr_text"] = text
        return text

    def _renew_repr(self) -> None:
        """Make the text that `repr` returns.

        At once rather than at the next `repr`, which may be inside a function that torch.compile
        traces: looking a text up can be traced there, making it can not.
        """
        self.__dict__.pop("_repr_text", None)
        repr(self)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._numerics() == other._numerics()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the cached text, which may hold addresses."""
        return {name: value for name, value in self.__dict__.items() if name != "_repr_text"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore and check; a field that the pickle's version did not have gets its default."""
        defaults = {f.name: _default_when_unpickled(f) for f in fields(self)}
        for name, value in (defaults | state).items():
            if value is MISSING:
                raise ValueError(f"the pickled {type(self).__name__} lacks {name!r}")
            setattr(self, name, value)
        self._renew_repr()


@_accept_unknown_arguments
@dataclass(repr=False, eq=False)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, predicted from the amaxes of earlier steps.

    After a step, ``scale = fp8_max * 2**-margin / amax``; a tensor is multiplied by its scale and
    cast. An amax of 0, Inf or NaN keeps the scale.

    Parameters
    ----------
    margin : int, default 0
        Binary orders of magnitude left free below the largest FP8 value, -126 to 126.
    fp8_format : Format, default Format.HYBRID
        Element types: HYBRID or E4M3.
    amax_history_len : int, default 1024
        Number of steps whose amaxes are kept, at least 1.
    amax_compute_algo : {"max", "most_recent"} or callable, default "max"
        How the amax is chosen from the history. A callable maps the history, a tensor of shape
        [amax_history_len, n] whose row 0 is the current step, to n amaxes.
    scaling_factor_compute_algo : callable, optional
        Computes new scales from ``(amax, old_scale, fp8_max, recipe)``. None is the formula above.
    reduce_amax : bool, default True
        Use the largest amax of all ranks of the group that ``autocast`` names.
    fp8_dpa, fp8_mha : bool, default False
        Run attention, and pass its inputs and outputs, in FP8.
    backward_override : None
        Exists for symmetry with other recipes; anything but None is refused.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is not None.
    ValueError
        A value of another field is out of range or of a wrong type. Both errors are raised by
        assignments, too.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _from_environment(config.TE_BACKWARD_OVERRIDE)

    _RULES = {
        # Beyond the exponents of fp32, 2**-margin is no scale any more.
        "margin": rules.integer(-126, 126, "an integer from -126 to 126"),
        "fp8_format": _fp8_format,
        "amax_history_len": rules.integer(1, math.inf, "an integer of at least 1"),
        "amax_compute_algo": rules.amax_compute_algo,
        "scaling_factor_compute_algo": rules.optional_callable,
        "reduce_amax": rules.boolean,
        "fp8_dpa": rules.boolean,
        "fp8_mha": rules.boolean,
        "backward_override": rules.no_backward_override,
    }


class _DerivedQParams:
    """QParams that follow the recipe's `use_power_2_scales` until the user assigns others.

    It has no `__set__`, so an assignment lands in the instance's dictionary and from then on hides
    this object; deleting the attribute brings the derived value back.
    """

    def __get__(self, recipe: "Float8CurrentScaling | None", owner: type) -> QParams:
        """Return the derived value; on the class, that of a recipe constructed now."""
        variable = config.TE_FP8_CURRENT_SCALING_POWER_2_SCALES
        power_2 = variable.get() if recipe is None else recipe.use_power_2_scales
        return QParams(power_2_scale=power_2)


@_accept_unknown_arguments
@dataclass(repr=False, eq=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, computed from the tensor itself just before the cast.

    ``scale = fp8_max / max(amax, amax_epsilon)``, and 1 where that amax is 0, Inf or NaN.

    Parameters
    ----------
    use_power_2_scales : bool, optional
        Round scales down to powers of two. Default: the variable
        ``TE_FP8_CURRENT_SCALING_POWER_2_SCALES`` at the time of construction, otherwise False.
    fp8_format : Format, default Format.HYBRID
        Element types: HYBRID or E4M3.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        How the GEMMs of the output, of the input's gradient and of the weight's gradient run. Split
        accumulation by default in the two gradients.
    fp8_dpa, fp8_mha : bool, default False
        Run attention, and pass its inputs and outputs, in FP8.
    backward_override : {None, "high_precision", "dequantized"}, optional
        Run the backward in high precision, from the operands as they were or as dequantized.
        Default: the variable ``TE_BACKWARD_OVERRIDE`` at the time of construction, otherwise None.

    Attributes
    ----------
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        How inputs, weights and gradients are quantized: no constructor arguments, but they can be
        assigned. One that is not assigned follows `use_power_2_scales`; one that is no longer does.
        ``del`` undoes an assignment.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is none of the three.
    ValueError
        A value of another field is out of range or of a wrong type, or a variable of the
        environment is not understood. Assignments raise these errors, too.
    """

    use_power_2_scales: bool = _from_environment(config.TE_FP8_CURRENT_SCALING_POWER_2_SCALES)
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _from_environment(config.TE_BACKWARD_OVERRIDE)

    # Without annotations: not fields, so that they stay out of the constructor.
    fp8_quant_fwd_inp = _DerivedQParams()
    fp8_quant_fwd_weight = _DerivedQParams()
    fp8_quant_bwd_grad = _DerivedQParams()

    _RULES = {
        "use_power_2_scales": rules.boolean,
        "fp8_format": _fp8_format,
        "fp8_gemm_fprop": rules.instance(MMParams),
        "fp8_gemm_dgrad": rules.instance(MMParams),
        "fp8_gemm_wgrad": rules.instance(MMParams),
        "fp8_dpa": rules.boolean,
        "fp8_mha": rules.boolean,
        "backward_override": rules.backward_override,
        "fp8_quant_fwd_inp": _fp8_qparams,
        "fp8_quant_fwd_weight": _fp8_qparams,
        "fp8_quant_bwd_grad": _fp8_qparams,
    }

    def _numerics(self) -> list[tuple[str, Any]]:
        """Add the QParams that differ from the derived ones, as only those say something new."""
        derived = QParams(power_2_scale=self.use_power_2_scales)
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        assigned = [(name, getattr(self, name)) for name in names]
        return super()._numerics() + [(n, value) for n, value in assigned if value != derived]
