# SPDX-License-Identifier: Apache-2.0
"""The one module that reads the environment.

Every variable is one `Variable` in this file: its name, its meaning, what it accepts. A caller
asks for the value where it is needed, ``config.TE_NVRTC.get()``, when a recipe or a module is built
or an ``autocast`` is entered; attention asks for its switches at each call. Nothing is read when a
module of the package is imported, so that a program may set variables after its imports; and
nothing is kept between two reads, so that a test may set and unset them. Native code never reads
the environment: it receives values.

Rules common to all variables:

- A variable that is unset, or set to the empty string, has its default.
- Names that users of NVIDIA's library already set (``NVTE_*``) are honoured as aliases. Where both
  are set, the ``TE_*`` name counts and the alias is not looked at.
- A value that is not understood is an error, never a default: a misspelt setting that is silently
  ignored costs a training run.
- Variables of NVIDIA's library that are not read here stand in `unread_variables`; one that is set
  is told once.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from transformer_engine.common.unread_variables import Unread

T = TypeVar("T")

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
"""Values of a recipe's ``backward_override``, besides None."""


@dataclass
class Variable(Generic[T]):
    """One environment variable."""

    default: T  # the value where it is unset or empty
    parse: Callable[[str], T]
    """From the text, neither empty nor surrounded by white space, to the value. Raises ValueError
    or KeyError where the text is none of what is accepted."""
    accepted: str  # what `parse` accepts, in words, for error messages and documentation
    doc: str  # what it does, in one sentence
    aliases: tuple[str, ...] = ()  # other names, tried in order where `name` is not set
    name: str = ""  # its name, starting with ``TE_``: that which it has in this module

    def get(self) -> T:
        """Read the variable now: the first of its names that is set, parsed, or `default`.

        ValueError for a text that is not understood: the message names the variable that was set,
        its value and what is accepted.
        """
        for name in (self.name, *self.aliases):
            text = os.environ.get(name, "").strip()
            if not text:
                continue
            try:
                return self.parse(text)
            except (KeyError, ValueError):
                raise ValueError(
                    f"environment variable {name}={text!r} is not understood; accepted: "
                    f"{self.accepted}; unset means {self.default!r}"
                ) from None
        return self.default


_SWITCH = {"0": False, "1": True, "false": False, "true": True}


def _flag(doc: str, *aliases: str, default: bool = False) -> Variable[bool]:
    """Make an on/off variable."""
    return Variable(
        default, lambda text: _SWITCH[text.lower()], "0, 1, false or true", doc, aliases
    )


def _choice(
    default: T, words: tuple[str, ...], doc: str, *aliases: str, fold: Callable = str
) -> Variable[str | T]:
    """Make a variable that is one of several words, which are `fold` of a text."""
    known = {word: word for word in words}
    return Variable(default, lambda text: known[fold(text)], " or ".join(words), doc, aliases)


def _absolute_path(text: str) -> Path:
    """Accept an absolute path; a leading ``~`` is the home directory.

    A relative path is refused: its meaning would change with the working directory, so that two
    processes of one job would not share their cache.
    """
    path = Path(os.path.expanduser(text))
    if not path.is_absolute():
        raise ValueError(text)
    return path


def _positive(text: str) -> int:
    """Accept an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


TE_FP8_CURRENT_SCALING_POWER_2_SCALES = _flag(
    "Default of Float8CurrentScaling's use_power_2_scales: round scales down to powers of two.",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
)
TE_FP8_BLOCK_SCALING_FP32_SCALES = _flag(
    "Default of Float8BlockScaling's use_f32_scales: scales are no powers of two.",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
)
TE_CACHE_WEIGHTS = _flag(
    "Default of a module's cache_weights: keep quantized weights from call to call, until they "
    "change. Read when a module is made."
)
TE_FP8_ATTENTION_BACKWARD = _flag(
    "Compute the gradients of FP8 attention in FP8 where that is possible and faster; with 0 "
    "they are always computed in high precision.",
    "NVTE_FP8_DPA_BWD",
    default=True,
)
TE_NVFP4_DISABLE_RHT = _flag(
    "Default of NVFP4BlockScaling's disable_rht: no random Hadamard transform.",
    "NVTE_NVFP4_DISABLE_RHT",
)
TE_NVFP4_DISABLE_STOCHASTIC_ROUNDING = _flag(
    "Default of NVFP4BlockScaling's disable_stochastic_rounding: gradients to nearest even.",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
)
TE_NVFP4_DISABLE_2D_QUANTIZATION = _flag(
    "Default of NVFP4BlockScaling's disable_2d_quantization: no scales of 16 x 16 weights.",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
)
TE_NVFP4_ROW_SCALED_ACTIVATION = _flag(
    "Default of NVFP4BlockScaling's row_scaled_activation.", "NVTE_NVFP4_ROW_SCALED_ACTIVATION"
)
NVFP4_SCOPES = ("none", "weights", "activations", "all")
TE_NVFP4_4OVER6 = _choice(
    "none", NVFP4_SCOPES, "Default of NVFP4BlockScaling's nvfp4_4over6.", "NVTE_NVFP4_4OVER6"
)
TE_NVFP4_4OVER6_E4M3_USE_256 = _choice(
    "all",
    NVFP4_SCOPES,
    "Default of NVFP4BlockScaling's nvfp4_4over6_e4m3_use_256.",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256",
)
TE_NVFP4_4OVER6_ERR_MODE = _choice(
    "MAE",
    ("MAE", "MSE"),
    "Default of NVFP4BlockScaling's nvfp4_4over6_err_mode.",
    "NVTE_NVFP4_4OVER6_ERR_MODE",
)
TE_UNFUSED_FP8_UPDATE = _flag(
    "Update delayed scaling with framework operations instead of the fused kernel: the history "
    "then rolls in steps without an amax too, and a NaN keeps the scale.",
    "NVTE_UNFUSED_FP8_UPDATE",
)
TE_BACKWARD_OVERRIDE = _choice(
    None,
    BACKWARD_OVERRIDES,
    "Default of a recipe's backward_override: run the backward in high precision, from the "
    "operands as they were or as dequantized.",
    "NVTE_BACKWARD_OVERRIDE",
)
TE_EXTRA_STATE = Variable(
    "auto",
    {word: word for word in ("auto", "always", "ignore")}.__getitem__,
    "auto, always or ignore",
    "always: a module's state dict has an _extra_state entry even where it is empty, for peers "
    "that insist on it; ignore: an _extra_state that is loaded is not looked at, and a module that "
    "has no scaling state offers none.",
)
TE_FLASH_ATTN = _flag(
    "Attention may run by torch's scaled_dot_product_attention, which chooses among its kernels "
    "by itself; that one is off where TE_FUSED_ATTN is off too. Read at each call.",
    "NVTE_FLASH_ATTN",
    default=True,
)
TE_FUSED_ATTN = _flag(
    "Attention may run by the library's own operator, or as with TE_FLASH_ATTN. Read at each call.",
    "NVTE_FUSED_ATTN",
    default=True,
)
TE_UNFUSED_ATTN = _flag(
    "Attention may run by two matrix products and the library's softmax. Read at each call.",
    "NVTE_UNFUSED_ATTN",
    default=True,
)
TE_ALLOW_NONDETERMINISTIC_ALGO = _flag(
    "Gradients of attention may differ in their last bits from run to run. They do not where "
    "this is 0 or torch asks for deterministic algorithms. Read at each call.",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    default=True,
)
TE_UNFUSED_DPA_EMULATE_FP8 = _flag(
    "Attention in FP8 that runs by two matrix products rounds what FP8 would, and multiplies in "
    "high precision; without it that is refused. Read at each call.",
    "NVTE_UnfusedDPA_Emulate_FP8",
)
ATTENTION_RECIPES = ("F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
TE_DPA_FP8_RECIPE = _choice(
    "",
    ATTENTION_RECIPES,
    "Recipe of attention alone, where that of the region has fp8_dpa or fp8_mha; F16: attention "
    "stays in high precision. Read at each call.",
    "NVTE_DPA_FP8_RECIPE",
)
TE_DPA_FP8_RECIPE_DPA = _flag(
    "fp8_dpa as MultiheadAttention takes it where TE_DPA_FP8_RECIPE is set: with fp8_mha it says "
    "what is handed to and from attention in FP8. Its core attention goes by the recipe's.",
    "NVTE_DPA_FP8_RECIPE_DPA",
)
TE_DPA_FP8_RECIPE_MHA = _flag(
    "fp8_mha as MultiheadAttention takes it where TE_DPA_FP8_RECIPE is set; likewise.",
    "NVTE_DPA_FP8_RECIPE_MHA",
)
TE_DPA_FP8_FORMAT = _choice(
    "HYBRID",
    ("HYBRID", "E4M3"),
    "Format of the recipe that TE_DPA_FP8_RECIPE names, in a region of NVFP4BlockScaling; in "
    "others it is that of their recipe.",
    "NVTE_DPA_FP8_FORMAT",
)
TE_DPA_FP8DS_AMAX_ALGO = _choice(
    "most_recent",
    ("max", "most_recent"),
    "amax_compute_algo of the recipe that TE_DPA_FP8_RECIPE=DelayedScaling makes.",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
)
TE_DPA_FP8DS_AMAX_HISTLEN = Variable(
    1,
    _positive,
    "an integer of at least 1",
    "amax_history_len of that recipe.",
    ("NVTE_DPA_FP8DS_AMAX_HISTLEN",),
)
TE_DPA_FP8DS_REDUCE_AMAX = _flag(
    "reduce_amax of that recipe.", "NVTE_DPA_FP8DS_REDUCE_AMAX", default=True
)
TE_CHECK_RANKS = _flag(
    "Before each reduction of the amaxes of delayed scaling the ranks of a group tell each other "
    "what they reduce, through the store of the group, and wait for each other: the error of ranks "
    "that differ names the first difference. In each call of attention over a cp_group they "
    "compare their calls, and check lengths of packed sequences. Set on all ranks. Read each time."
)
TE_NVRTC = _flag(
    "Compile the embedded device source with NVRTC even where a device image would load."
)
TE_GEMM_TUNE = _flag(
    "Time the candidates of the GEMM heuristic at a shape's first call and remember the winner."
)
TE_CACHE_DIR: Variable[Path | None] = Variable(
    None,
    _absolute_path,
    "an absolute path",
    "Directory of what is remembered between processes (compiled device code, plans of attention, "
    "tuned GEMMs). Use cache_dir(), which knows the default.",
)

PLUGIN_PREFERENCES = ("flagos", "default", "vendor", "reference")


def _words(text: str) -> tuple[str, ...]:
    """Accept words with commas between them."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError(text)
    return found


def _module_name(text: str) -> str:
    """Accept a dotted name."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(text)
    return text


def _orders(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Accept tokens by operator."""
    found = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        op, equals, tokens = part.partition("=")
        listed = tuple(token.strip() for token in tokens.split("|") if token.strip())
        if not (equals and op.strip() and listed) or op.strip() in found:
            raise ValueError(text)
        found[op.strip()] = listed
    return tuple(found.items())


_WORDS = "words with commas between them"
TE_FL_PREFER = _choice(
    "",
    PLUGIN_PREFERENCES,
    "Kind of implementation that the plug-in system chooses first; flagos where unset.",
    fold=str.lower,
)
TE_FL_PREFER_VENDOR = _flag("Where TE_FL_PREFER is unset: implementations of vendors go first.")
TE_FL_STRICT = _flag(
    "An implementation of an operator that does not take a call is an error; else the next one "
    "is asked."
)
TE_FL_ALLOW_VENDORS = Variable(
    (), _words, _WORDS, "Vendors of whose implementations alone some run."
)
TE_FL_DENY_VENDORS = Variable((), _words, _WORDS, "Vendors of whose implementations none runs.")
TE_FL_PER_OP = Variable(
    (),
    _orders,
    "op=token|token;op=token, with tokens as docs/plugins.md has them",
    "Order of implementations of single operators, in place of that by kinds.",
)
TE_FL_PLUGIN_MODULES = Variable(
    (),
    _words,
    "names of Python modules and paths of shared objects (/, or .so or .so.1 at the end) "
    "with commas between them",
    "What registers implementations, besides installed packages.",
)
TE_PLUGIN = Variable(
    "",
    _module_name,
    "name of a Python module",
    "Its load_plugins() may put its own transformer_engine_torch in place: docs/plugins.md.",
    ("NVTE_PLUGIN",),
)
TE_FL_SKIP_CUDA = _flag(
    "This library's CUDA kernels are not used: its operators take no CUDA tensors, those of "
    "plug-ins and of plain torch do."
)
LOG_LEVELS = ("NOTSET", "DEBUG", "INFO", "WARN", "WARNING", "ERROR", "FATAL", "CRITICAL")
TE_FL_LOG_LEVEL = _choice(
    "WARNING",
    LOG_LEVELS,
    "Least level of what the plug-in system writes to stderr.",
    "TEFL_LOG_LEVEL",
    fold=str.upper,
)

TE_JAX_CUSTOM_CALLS = _flag(
    "JAX: layers run by custom calls of XLA into the C library, and not by their definitions in "
    "jax.numpy. Read while a function is traced.",
    "NVTE_JAX_CUSTOM_CALLS",
    default=True,
)

TABLE: tuple[Variable, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))
"""Every variable, in the order of this file."""
for _name, _value in list(globals().items()):
    if isinstance(_value, Variable):
        _value.name = _name


def _read_together(kind: type[T], *variables: Variable) -> Callable[[], T]:
    """Make a function that gives the values of several variables now, as a named tuple.

    For those that are asked for at each call, so it must take no time: asking ``os.environ`` for a
    variable that is not set takes a microsecond, the dictionary of bytes behind it a fiftieth of
    that.
    """
    keys = tuple(os.fsencode(name) for v in variables for name in (v.name, *v.aliases))

    def read(texts: tuple) -> T:
        del texts  # it only tells one environment from another
        return kind(*(variable.get() for variable in variables))

    remembered = functools.lru_cache(maxsize=64)(read)

    def values() -> T:
        data = getattr(os.environ, "_data", None)
        if type(data) is not dict:  # a program has put another mapping in place of os.environ
            return read(())
        if data.keys().isdisjoint(keys):
            return remembered(())
        return remembered(tuple(map(data.get, keys)))

    return values


class AttentionSwitches(NamedTuple):
    """Which kinds of attention may run: ``TE_FLASH_ATTN`` and the others."""

    flash: bool
    fused: bool
    unfused: bool
    nondeterministic: bool = True
    emulate: bool = False  # FP8, by what runs in high precision


attention_switches = _read_together(
    AttentionSwitches,
    TE_FLASH_ATTN,
    TE_FUSED_ATTN,
    TE_UNFUSED_ATTN,
    TE_ALLOW_NONDETERMINISTIC_ALGO,
    TE_UNFUSED_DPA_EMULATE_FP8,
)
"""Which kinds of attention may run now, `AttentionSwitches`: programs flip them between two calls.

ValueError for a switch that is not understood.
"""


class AttentionRecipe(NamedTuple):
    """How the recipe of attention differs from that of its region: ``TE_DPA_FP8_RECIPE``, ..."""

    name: str  # one of `ATTENTION_RECIPES`; "": it does not
    format: str  # in a region of NVFP4
    amax_compute_algo: str  # this one and the next two are of delayed scaling
    amax_history_len: int
    reduce_amax: bool
    fp8_dpa: bool  # this one and the next as `MultiheadAttention` takes them
    fp8_mha: bool


attention_recipe = _read_together(
    AttentionRecipe,
    TE_DPA_FP8_RECIPE,
    TE_DPA_FP8_FORMAT,
    TE_DPA_FP8DS_AMAX_ALGO,
    TE_DPA_FP8DS_AMAX_HISTLEN,
    TE_DPA_FP8DS_REDUCE_AMAX,
    TE_DPA_FP8_RECIPE_DPA,
    TE_DPA_FP8_RECIPE_MHA,
)
"""Recipe of attention that the environment names now, `AttentionRecipe`.

ValueError for a variable that is not understood.
"""


def cache_dir() -> Path | None:
    """Return the directory for what is remembered between processes; it may not exist yet.

    ``TE_CACHE_DIR`` where it is set (ValueError for a relative path), else ``transformer_engine``
    under ``XDG_CACHE_HOME`` or ``~/.cache``. None where the process has no home directory: nothing
    is remembered then.
    """
    path = TE_CACHE_DIR.get()
    if path is not None:
        return path
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG rules: a relative path counts as unset
        base = os.path.join(os.path.expanduser("~"), ".cache")
    # expanduser leaves "~" in place where there is no home directory.
    return Path(base) / "transformer_engine" if os.path.isabs(base) else None


def unread(entries: Iterable["Unread"]) -> list[str]:
    """Return a line for each variable of `entries` that is set to what is not done here anyway."""
    return [
        entry.line(name, value)
        for entry in entries
        for name in entry.names.split()
        if (value := os.environ.get(name, "").strip()) and value not in entry.same.split()
    ]


@functools.cache
def warn_of_unread(entries: Iterable["Unread"]) -> None:
    """Warn of each of `entries` that is set, once a process: at the first call."""
    for line in unread(entries):
        warnings.warn(line, UserWarning, stacklevel=2)
