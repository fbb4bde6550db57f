# SPDX-License-Identifier: Apache-2.0
"""When what modules run by the plug-in system has changed."""

GENERATION = ["0"]
"""A text that is another one after every change: graphs of torch.compile have it among their
conditions, which take numbers that change for variables."""

MET: set[str] = set()
"""Types of devices, by torch's names, that were met and that this library has no kernels for."""


def changed() -> None:
    """Tell that policies or registrations have changed which modules obey."""
    GENERATION[0] = str(int(GENERATION[0]) + 1)
