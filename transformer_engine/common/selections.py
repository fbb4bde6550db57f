# SPDX-License-Identifier: Apache-2.0
"""When what modules run by the plug-in system has changed."""

__all__ = ["GENERATION", "WITH_CLASS", "changed"]

GENERATION = ["0"]
"""A text that is another one after every change: graphs of torch.compile have it among their
conditions, which take numbers that change for variables."""

WITH_CLASS: set[int] = set()
"""Numbers of the selections under which `te.DotProductAttention` asks for a class."""


def changed() -> None:
    """Tell that policies or registrations have changed which modules obey."""
    GENERATION[0] = str(int(GENERATION[0]) + 1)
