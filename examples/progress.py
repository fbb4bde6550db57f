# SPDX-License-Identifier: Apache-2.0
"""A progress bar that does not take its first step for a usual one."""

from __future__ import annotations

from tqdm import tqdm


class Progress(tqdm):
    """A bar whose clock starts with the second step.

    Before that, a run finds scales, validates, loads kernels and fills caches: an estimate of the
    time that remains, made from it, is hours where minutes are true.
    """

    settled = False

    def update(self, n: float | None = 1) -> bool | None:
        """Count `n` steps."""
        if self.settled:
            return super().update(n)
        self.settled = True
        self.n += n
        self.initial = self.last_print_n = self.n  # no part of the rate
        self.unpause()
        return None
