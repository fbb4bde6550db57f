# SPDX-License-Identifier: Apache-2.0
"""State that an `autocast` region sets: per thread, read by every module's forward."""

import threading
from typing import Any

from transformer_engine.common.contexts import Context


class Domain:
    """Scaling state that is updated together: of the modules that first ran in one thread."""

    def __init__(self) -> None:
        # Direction -> key -> `arenas.Arena`.
        self.arenas: dict[str, dict[tuple, Any]] = {"forward": {}, "backward": {}}
        # Itself and the domains that are updated with it, because a thread trains modules of both,
        # sorted by number. All of them hold this one list.
        self.joined = [self]
        # Equal in domains that are updated together, and read by guards of compiled graphs, which
        # compare numbers; -1 before there is state and after a reset.
        self.label = -1
        self.number = -1  # counts domains in the order in which they got state; -1 before

    def has_state(self) -> bool:
        """Return whether modules have slots in it."""
        return any(self.arenas.values())

    def order(self) -> int:
        """Number, to sort by: what ranks reduce must not follow the order of a set."""
        return self.number


class RegionState:
    """State of the innermost region of a thread."""

    def __init__(self) -> None:
        self.enabled = False  # modules run in FP8
        self.calibrating = False  # modules that do not run in FP8 record amaxes
        self.recipe: Any = None  # how the modules quantize; None outside every region
        # How modules that are made now keep their weights (`quantized_model_init`); None: as usual.
        self.quantized_init: Any = None
        self.group: Any = None  # the ProcessGroup that amaxes are reduced over, or None
        # No module of the region has recorded a backward yet: the first one that does updates the
        # backward state after its own backward.
        self.owes_update = False
        self.depth = 0  # nested regions
        self.region: Any = None  # the innermost region, an `autocast` of eager code
        self.entered: list = []  # those of calls of `FP8GlobalStateManager.autocast_enter`
        # Graphs repeat a forward that has cast by what it measured, where scales are known by now.
        self.measures = False
        self.domain = Domain()  # whose state the updates of the thread's regions touch
        # The domain's; -1 where the thread has made no state and trained no module that has some.
        self.label = -1

    def why(self) -> str:
        """Why modules do not run in FP8, where they do not."""
        if self.calibrating:
            return "autocast was calibrating"
        return "autocast(enabled=False) was in force" if self.depth else "no autocast was in force"


# A plain threading.local, no context variable and no subclass: torch.compile traces attributes of
# exactly this type.
_LOCAL = threading.local()
_LOCAL.state = RegionState()


def current_state() -> RegionState:
    """State of this thread; outside every region at first."""
    try:
        return _LOCAL.state
    except AttributeError:
        _LOCAL.state = RegionState()
        return _LOCAL.state


class in_region(Context):  # noqa: N801 - reads as what it does, as `autocast`
    """Have this thread in a region, inside ``with``."""

    def __init__(self, state: RegionState) -> None:
        self._state = state

    def _enter(self) -> None:
        current_state()
        self._set(_LOCAL, state=self._state)
