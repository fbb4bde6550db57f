# SPDX-License-Identifier: Apache-2.0
"""What an `autocast` region sets: per thread, read by every module's forward.

A `threading.local`, because `torch.compile` traces its attributes and guards on them, which it can
not do with context variables.
"""

import threading
from typing import Any

__all__ = ["STATE", "RegionState"]


class RegionState(threading.local):
    """State of the innermost region of this thread.

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

    enabled: bool = False
    calibrating: bool = False
    recipe: Any = None
    group: Any = None
    first: bool = False
    depth: int = 0


STATE = RegionState()
