# SPDX-License-Identifier: Apache-2.0
"""Parts of recipes: element types, options, rules of fields, and their base.

Programs know all of this from `recipe`, where the recipes are; pickles name that module.
"""

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from transformer_engine.common import config, recipe_rules as rules

_RECIPES = "transformer_engine.common.recipe"

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
        if direction not in ("fwd", "bwd"):
            raise ValueError(f"direction must be 'fwd' or 'bwd', got {direction!r}")
        return self.value.max_fwd if direction == "fwd" else self.value.max_bwd

    def dtype_name(self, direction: str) -> str:
        """Return the name of a direction's element type: "e4m3", "e5m2" or "e2m1"; as `fp8_max`."""
        return _DTYPE_OF_LARGEST[self.fp8_max(direction)]

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickle by value; some releases of Python would name the builtin `getattr` instead."""
        return Format, (self.value,)


# --- Rules of what is defined here; `recipe_rules` has the others, and says what a rule is.


def format_rule(where: str, value: Any) -> Format:
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


def qparams_rule(where: str, value: Any) -> "QParams":
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


def setting(rule: Callable[[str, Any], Any], default: Any = MISSING) -> Any:
    """Make a field of a recipe with the rule of its values; see `Recipe`.

    A default that is a variable is read from the environment when a recipe is constructed.
    """
    metadata = {"rule": rule}
    if isinstance(default, config.Variable):
        return field(default_factory=default.get, metadata=metadata | {"variable": default})
    return field(default=default, metadata=metadata)


def gemm_setting(split: bool) -> Any:
    """How a kind of GEMM runs; `split`: whether it accumulates so by default."""
    return setting(rules.instance(MMParams), MMParams(use_split_accumulator=split))


class DerivedQParams:
    """QParams of one kind of tensor, which follow the recipe until the user assigns others.

    They are no fields and so no arguments of the constructor. There is no `__set__`, so that an
    assignment lands in the instance's dictionary and from then on hides this object; deleting the
    attribute brings the derived value back.
    """

    def __init__(
        self, derive: "Callable[[Any], QParams]", rule: Callable[[str, Any], Any] = qparams_rule
    ) -> None:
        self.derive = derive
        self.rule = rule

    def __get__(self, recipe: "Recipe | None", owner: type) -> "QParams":
        """Return the derived value; on the class, that of a recipe constructed now."""
        return self.derive(owner() if recipe is None else recipe)


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
# because the user of such a program could not act on a warning or an error.
_IGNORED_ARGUMENTS = frozenset(
    {"backend", "device", "interval", "opt_level", "override_linear_precision", "params_dtype"}
)


@dataclass_transform(eq_default=False, field_specifiers=(setting, gemm_setting))
def recipe_class(cls: type) -> type:
    """Make a recipe of a class whose fields are settings (class decorator).

    Its constructor ignores keyword arguments that existing programs pass to every version. Another
    one that it does not have gives a TypeError that names it: it may be a misspelt field.
    """
    cls = dataclass(repr=False, eq=False)(cls)
    members = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    cls._QPARAMS = {n: value for n, value in members.items() if isinstance(value, DerivedQParams)}
    cls._RULES = {f.name: f.metadata["rule"] for f in fields(cls)}
    cls._RULES |= {name: qparams.rule for name, qparams in cls._QPARAMS.items()}
    cls.__module__ = _RECIPES
    strict = cls.__init__
    known = frozenset(f.name for f in fields(cls) if f.init)

    @functools.wraps(strict)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name not in known]:
            value = kwargs.pop(name)
            if name not in _IGNORED_ARGUMENTS:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name}={value!r}: leave it out, or "
                    f"spell it as one of {', '.join(f.name for f in fields(cls) if f.init)}"
                )
        strict(self, *args, **kwargs)
        self._check_fields()
        self._renew_repr()

    cls.__init__ = __init__
    return cls


_FOR_GRAPHS: dict[str, "Recipe"] = {}
"""Recipes of graphs that were traced, by their texts."""


@dataclass(repr=False, eq=False)
class Recipe:
    """Base of all recipes.

    The class methods tell recipes apart, on a class or an instance. Two recipes are equal if they
    have one class and the same numerics. Recipes can be written to and are therefore not hashable:
    `repr` is the key to use.

    A subclass lists its fields with their rules (`recipe_class`, `setting`), in the order of its
    constructor's arguments; a rule takes a name for messages and a value, and returns the value to
    store or raises. Assignments raise what the constructor does.
    """

    _RULES: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}
    _QPARAMS: ClassVar[Mapping[str, DerivedQParams]] = {}
    _KIND: ClassVar[str] = ""  # how scales are found

    @classmethod
    def delayed(cls) -> bool:
        """Return whether scales come from the amaxes of earlier steps."""
        return cls._KIND == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Return whether FP8 tensors have one scale each, from their own amax."""
        return cls._KIND == "current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Return whether FP8 tensors have one scale each, delayed or current."""
        return cls._KIND in ("delayed", "current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Return whether FP8 tensors have a scale per 1 x 128 or 128 x 128 tile."""
        return cls._KIND == "block"

    @classmethod
    def float8_row_scaling(cls) -> bool:
        """Return whether FP8 tensors have a scale per row of an operand (not the incumbent's)."""
        return cls._KIND == "row"

    @classmethod
    def mxfp8(cls) -> bool:
        """Return whether FP8 tensors have a power-of-two scale per 32 values."""
        return cls._KIND == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        """Return whether FP4 tensors have a scale per 16 values."""
        return cls._KIND == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Return whether quantizers come from a function of the user."""
        return cls._KIND == "custom"

    def keep_for_graphs(self) -> None:
        """Keep the recipe for `kept_for_graphs`; torch.compile runs this while it traces."""
        _FOR_GRAPHS[repr(self)] = self

    keep_for_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @staticmethod
    def kept_for_graphs(identity: str) -> "Recipe | None":
        """Return a recipe whose `repr` is `identity`, of those that were kept; "": None."""
        return copy.copy(_FOR_GRAPHS[identity]) if identity else None

    def _numerics(self) -> list[tuple[str, Any]]:
        """Return everything that changes numerics, as (name, value)."""
        # A subclass may call this class's constructor before it sets fields of its own.
        pairs = [(f.name, getattr(self, f.name, None)) for f in fields(self)]
        for name, qparams in self._QPARAMS.items():  # derived ones say nothing new
            value = self.__dict__.get(name)
            if value is not None and value != qparams.derive(self):
                pairs.append((name, value))
        return pairs

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a field's new value, store it and renew the `repr`."""
        rule = self._RULES.get(name)
        if rule is not None:
            value = rule(f"{type(self).__name__}.{name}", value)
        if "_repr_text" not in self.__dict__:  # while the constructor runs
            object.__setattr__(self, name, value)
            return
        before = dict(self.__dict__)
        object.__setattr__(self, name, value)
        try:
            self._check_fields()
        except AssertionError:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        self._renew_repr()

    def _check_fields(self) -> None:
        """Raise AssertionError where fields do not go together."""

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
        self._check_fields()
        self._renew_repr()


for _public in (_FormatHelper, Format, MMParams, QParams, Recipe):
    _public.__module__ = _RECIPES
