# SPDX-License-Identifier: Apache-2.0
"""`Fp8Meta`: the recipe and the scaling state of a module, as programs read them."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.execution.thread_state import current_state

if TYPE_CHECKING:
    from transformer_engine.pytorch.module.base import Fp8Module

_DIRECTIONS = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
BUFFER_INFO = "buffer_info"


def unique_key(identity: str, group: Any) -> str:
    """Text of what slots have in common that are updated together: a recipe's, and the group."""
    return f"{identity}:{0 if group is None else id(group)}"


class ScalingView:
    """Scales and amax histories of one direction of a module under delayed scaling.

    Attributes are read anew at each access. They are views of the memory that the next call reads,
    or, before the first call after a checkpoint was loaded, of what was loaded.
    """

    __slots__ = ("_direction", "_module")

    def __init__(self, module: "Fp8Module", direction: str) -> None:
        self._module = module
        self._direction = direction

    def _tensors(self) -> tuple[Tensor, Tensor]:
        values = live_values(self._module)
        if values is None:
            raise RuntimeError(
                f"{type(self._module).__name__}: its scaling state is gone (reset); it begins "
                "anew at the next FP8 forward"
            )
        return values[self._direction]

    @property
    def scale(self) -> Tensor:
        """[slots] fp32: a tensor is multiplied by its scale, then cast."""
        return self._tensors()[0]

    @property
    def scale_inv(self) -> Tensor:
        """[slots] fp32: 1 / scale, a new tensor."""
        return self._tensors()[0].reciprocal()

    @property
    def amax_history(self) -> Tensor:
        """[length, slots] fp32: row 0 collects, the last row is the newest finished step."""
        return self._tensors()[1]

    def __repr__(self) -> str:
        scale, history = self._tensors()
        return f"ScalingView(scale={scale}, amax_history={history})"


def live_values(module: "Fp8Module") -> dict[str, tuple[Tensor, Tensor]] | None:
    """Direction -> (scale, history) of a module, not copied; None where it has none."""
    if module._loaded_state is not None:
        return module._loaded_state
    slots = module._slots
    if slots is None or not slots.live:
        return None
    return slots.views()


class Fp8Meta(Mapping):
    """State of FP8 of a module, by the names that programs read. It can not be written to.

    ``fp8_checkpoint``
        Whether the module has run in FP8, or loaded what one that did has saved.
    ``fp8_group``
        The group that its amaxes are reduced over.
    ``num_gemms``
        Its linear layers.
    ``recipe``, ``fp8_max_fwd``, ``fp8_max_bwd``
        The recipe in force, else the one it used last, and the largest values of its formats; once
        there is one.
    ``scaling_fwd``, ``scaling_bwd``
        `ScalingView`, under delayed scaling and once there is state.
    ``buffer_info``
        Of each direction the key of the memory that it lies in
        (`FP8GlobalStateManager.get_key_in_buffer`), and the first slot there.
    """

    def __init__(self, module: "Fp8Module") -> None:
        self._module = module

    def _recipe(self) -> Recipe | None:
        state = current_state()
        if state.enabled:
            return state.recipe
        known = self._module._quantization
        return None if known is None else known[2]

    def _items(self) -> dict[str, Any]:
        module = self._module
        slots = module._slots
        items: dict[str, Any] = {
            "fp8_checkpoint": module.fp8_initialized,
            "fp8_group": None if slots is None else slots.group,
            "num_gemms": module.SLOTS[0] // 3,
        }
        recipe = self._recipe()
        if recipe is not None:
            items["recipe"] = recipe
            items["fp8_max_fwd"] = recipe.fp8_format.fp8_max("fwd")
            items["fp8_max_bwd"] = recipe.fp8_format.fp8_max("bwd")
        if live_values(module) is not None:
            for key, direction in _DIRECTIONS.items():
                items[key] = ScalingView(module, direction)
        if slots is not None and slots.live:
            unique = unique_key(slots.identity, slots.group)
            items[BUFFER_INFO] = {
                "forward": (f"forward_{unique}", slots.forward_slot),
                "backward": (f"backward_{unique}", slots.backward_slot),
            }
        return items

    def __getitem__(self, key: str) -> Any:
        return self._items()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept what is there already, as programs that replay graphs do; else TypeError."""
        items = self._items()
        if items.get(key) is value or (key == "recipe" and value == items.get(key)):
            return
        raise TypeError(
            f"{type(self._module).__name__}.fp8_meta[{key!r}] = ...: fp8_meta is a view. The "
            "recipe and the group are those of autocast(); scaling state is set by "
            "load_state_dict"
        )

    def __repr__(self) -> str:
        return f"Fp8Meta({self._items()})"
