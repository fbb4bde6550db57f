# SPDX-License-Identifier: Apache-2.0
"""What an `autocast` region sets: per thread, read by every module's forward."""

import threading
from typing import Any

__all__ = ["RegionState", "current_state"]


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
    """

    def __init__(self) -> None:
        self.enabled = False
        self.calibrating = False
        self.recipe: Any = None
        self.group: Any = None
        self.first = False
        self.depth = 0

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
