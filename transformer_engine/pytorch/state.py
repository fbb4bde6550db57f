# SPDX-License-Identifier: Apache-2.0
"""What an `autocast` region sets: per thread, read by every module's forward."""

import threading
from typing import Any

__all__ = ["Domain", "RegionState", "current_state"]


class Domain:
    """Scaling state that is updated together: of the modules that first ran in one thread.

    Attributes
    ----------
    arenas : dict
        direction -> key -> `arenas.Arena`.
    joined : list of Domain
        Those that are updated with this one, because a thread trains modules of both, by their
        numbers.
    label : int
        The same for those that are updated together; -1 before there is state and after a reset.
    number : int
        In the order in which they got state; -1 before.
    """

    def __init__(self) -> None:
        self.arenas: dict[str, dict[tuple, Any]] = {"forward": {}, "backward": {}}
        self.joined = [self]
        self.label = self.number = -1

    def has_state(self) -> bool:
        """Whether modules have slots in it."""
        return any(self.arenas.values())

    def order(self) -> int:
        """Number, to sort by: what ranks reduce must not follow the order of a set."""
        return self.number


class RegionState:
    """State of the innermost region of a thread.

    Attributes
    ----------
    enabled : bool
        Modules run in FP8.
    calibrating : bool
        Modules that do not run in FP8 record amaxes.
    recipe : Recipe or None
        How the modules quantize; None outside every region.
    group : torch.distributed.ProcessGroup or None
        Amaxes are reduced over it.
    first : bool
        No module of the region has recorded a backward yet: the first one that does updates the
        backward state after its own backward.
    depth : int
        Nested regions.
    domain : Domain
        What the updates of the thread's regions touch.
    label : int
        Of that domain; -1 where the thread has made no state and trained no module that has some.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.calibrating = False
        self.recipe: Any = None
        self.group: Any = None
        self.first = False
        self.depth = 0
        self.domain = Domain()
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
