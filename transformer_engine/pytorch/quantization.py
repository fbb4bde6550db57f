# SPDX-License-Identifier: Apache-2.0
"""State in force and capabilities of this machine, under the names that programs ask by."""

import contextlib
from functools import partial
from typing import Any

import torch

from transformer_engine.common import absent
from transformer_engine.common.contexts import Context
from transformer_engine.common.recipe import (
    DelayedScalingRequest as DelayedScalingRequest,
    QuantizerRequest as QuantizerRequest,
    QuantizerRole as QuantizerRole,
    Recipe,
)
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.execution.thread_state import Domain, RegionState, current_state
from transformer_engine.pytorch.module.manager_names import ManagerNames
from transformer_engine.pytorch.module.quantized import QuantizedInit
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.scaling_state.autocast import (
    autocast as autocast,
    fp8_autocast as fp8_autocast,
    get_default_recipe as get_default_recipe,
)
from transformer_engine.pytorch.torchside.device import (
    get_device_compute_capability,
    is_any_captured,
    is_bf16_available as is_bf16_available,
    is_fp8_available as is_fp8_available,
    is_fp8_block_scaling_available as is_fp8_block_scaling_available,
    is_mxfp8_available as is_mxfp8_available,
    is_nvfp4_available as is_nvfp4_available,
)
from transformer_engine.pytorch.torchside.modes import graph_task

__getattr__, __dir__ = absent.attach(globals())

get_default_fp8_recipe = get_default_recipe

_DIRECTION = {True: "fwd", False: "bwd"}


check_fp8_support = partial(is_fp8_available, return_reason=True)
check_mxfp8_support = partial(is_mxfp8_available, return_reason=True)
check_nvfp4_support = partial(is_nvfp4_available, return_reason=True)
check_fp8_block_scaling_support = partial(is_fp8_block_scaling_available, return_reason=True)
"""Answer and reason: (whether it can be used here, why not)."""


def check_recipe_support(recipe: Recipe) -> None:
    """Raise where a recipe can not run here.

    TypeError for no recipe, RuntimeError where the CUDA device has no FP8 GEMMs with its scales.
    Without a CUDA device the CPU backend runs every recipe as a reference.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: {type(recipe).__name__} object, expected a recipe")
    tiles = recipe.float8_block_scaling() or recipe.float8_row_scaling()
    supported, reason = check_fp8_block_scaling_support() if tiles else check_fp8_support()
    if get_device_compute_capability() != (0, 0) and not supported:
        raise RuntimeError(f"{type(recipe).__name__}: {reason}")


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Number of rows that GEMMs of a recipe come in: 16; of MXFP8 32, of NVFP4 128.

    Modules pad by themselves; programs that pack sequences ask to save that copy.
    """
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Element type of a recipe, of the forward or of the backward, as a torch dtype."""
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    return kinds[fp8_recipe.fp8_format.dtype_name(_DIRECTION[fprop_tensor])]


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> Any:
    """Element type of a recipe, of the forward or of the backward, as a `DType`."""
    return TE_DType[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Largest finite value of a recipe's element type, of the forward or of the backward."""
    return fp8_recipe.fp8_format.fp8_max(_DIRECTION[fprop_tensor])


class quantized_model_init(Context, contextlib.ContextDecorator):  # noqa: N801 - users' name
    """Make modules with quantized weights: a context, or a decorator.

    The weights of linear layers that are made inside become quantized parameters; biases and norms
    stay in ``params_dtype``, which is the nominal dtype of the weights and that of their gradients.
    Those of a module that is made without gradients (`torch.no_grad`) are held row-wise alone: none
    can pass them, unless the format can be turned or the recipe has a ``backward_override``.

    Parameters
    ----------
    enabled : bool, default True
        False makes modules as usual, also inside of an enabled one.
    recipe : Recipe, optional
        Under which the modules will run: `DelayedScaling` (the default), `Float8CurrentScaling`,
        `Float8BlockScaling`, `Float8RowScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`, or a
        `CustomRecipe`, whose quantizers of weights make the parameters; a weight whose quantizer
        keeps no tensor (`IdentityQuantizer`) stays in high precision.
    preserve_high_precision_init_val : bool, default False
        Keep the values that were quantized, on the CPU: ``weight.get_high_precision_init_val()``
        gives them, for the master weights of an optimizer, and
        ``weight.clear_high_precision_init_val()`` lets them go.

    Raises
    ------
    TypeError
        `recipe` is not a recipe.
    ValueError
        A module is made, and the function of a `CustomRecipe` gives no quantizer for a role.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        self._settings = (enabled, recipe, preserve_high_precision_init_val)

    def _recreate_cm(self) -> "quantized_model_init":
        """Give each call of a decorated function a context of its own."""
        return type(self)(*self._settings)

    def _enter(self) -> None:
        enabled, recipe, preserve = self._settings
        state, made = current_state(), None
        if enabled:
            recipe = get_default_recipe() if recipe is None else recipe
            if not isinstance(recipe, Recipe):
                raise TypeError(
                    f"quantized_model_init: recipe: {type(recipe).__name__} object, expected a "
                    "recipe"
                )
            made = QuantizedInit(recipe, bool(preserve))
        self._undo_by(setattr, state, "quantized_init", state.quantized_init)
        state.quantized_init = made


fp8_model_init = quantized_model_init
"""`quantized_model_init` under its older name."""


def _of_thread(field: str, doc: str) -> property:
    """A field of this thread's state as a read-only attribute."""
    return property(lambda self: getattr(current_state(), field), doc=doc)


class _QuantizationState:
    """State of this thread as attributes; `FP8GlobalStateManager.quantization_state`."""

    fp8_parameters = property(lambda self: FP8GlobalStateManager.with_fp8_parameters())
    high_precision_init_val = property(
        lambda self: FP8GlobalStateManager.with_high_precision_init_val()
    )
    skip_fp8_weight_update_tensor = None
    fp8_enabled = _of_thread("enabled", "Modules run in FP8.")
    fp8_calibration = _of_thread("calibrating", "Modules record amaxes in high precision.")
    fp8_recipe = _of_thread("recipe", "Recipe in force.")
    fp8_distributed_group = _of_thread("group", "Group that amaxes are reduced over.")
    is_first_fp8_module = _of_thread("owes_update", "No module has recorded a backward yet.")
    autocast_depth = _of_thread("depth", "Nested regions.")

    @property
    def fp8_graph_capturing(self) -> bool:
        """A CUDA graph is being captured."""
        return FP8GlobalStateManager.fp8_graph_capturing()


class _InForce(tuple):
    """State in force in a thread, and the domain that its regions update."""

    domain: Domain | None = None


class FP8GlobalStateManager(ManagerNames):
    """State in force in this thread, and the scaling state of all modules.

    A view under the names that programs use; `autocast` and the modules do not need it.
    """

    quantization_state = _QuantizationState()

    @classmethod
    def reset(cls) -> None:
        """Drop the scaling state of every module; see `transformer_engine.pytorch.reset`.

        Outside every region also the state that a thread would have kept from a broken one.
        """
        scaling.reset()
        state = current_state()
        if state.depth == 0:
            state.__dict__.update(RegionState().__dict__)

    # ---- what this machine can do ----------------------------------------------------------------

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)

    # ---- what is in force ------------------------------------------------------------------------

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether modules run in FP8 now."""
        return current_state().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Return whether modules record amaxes in high precision now."""
        return current_state().calibrating

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The group that amaxes are reduced over; None: all ranks."""
        return current_state().group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return whether modules are made with quantized weights, see `quantized_model_init`."""
        return current_state().quantized_init is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Return whether these keep their first values."""
        init = current_state().quantized_init
        return init is not None and init.preserve

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe in force; the default one where there is none."""
        recipe = current_state().recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return whether a CUDA graph is being captured."""
        return graph.is_graph_capturing() or is_any_captured()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Take the flag of the region's first module: True once a region.

        Who gets True updates the backward scales (`reduce_and_update_fp8_tensors`) after the
        backward; no module of the region will.
        """
        state = current_state()
        owed, state.owes_update = state.owes_update, False
        return owed

    @classmethod
    def get_autocast_state(cls) -> tuple:
        """All of what is in force, for `set_autocast_state`."""
        state = current_state()
        values = state.enabled, state.calibrating, state.recipe, state.group, state.owes_update
        found = _InForce(values)
        found.domain = state.domain
        return found

    @classmethod
    def set_autocast_state(cls, state: tuple) -> None:
        """Put what `get_autocast_state` gave in force, without entering a region.

        A thread that takes over what another has in force works for that one's models.
        """
        current = current_state()
        domain = getattr(state, "domain", None)
        if domain is not None and graph_task() == -1:
            arenas.join(current, domain)
        current.enabled, current.calibrating, current.recipe, current.group, current.owes_update = (
            state
        )

    get_fp8_autocast_state = get_autocast_state
    set_fp8_autocast_state = set_autocast_state

    # ---- scaling state ---------------------------------------------------------------------------

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: Any, **options: Any) -> None:
        """Nothing: the scaling state of a module is part of the updates since it exists."""

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Turn the amaxes of the forward, or of the backward, into scales now.

        Regions and backwards do it by themselves: for programs that replay captured graphs. It
        touches the models of this thread; all of the process in a thread that has run none.
        """
        scaling.update_now("forward" if forward else "backward")

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Let captured graphs keep quantized weights: NotImplementedError for True."""
        if skip:
            raise absent.refusal(
                "pytorch.quantization.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
                "(True)",
            )

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """None: no graph keeps quantized weights."""
        return None
