# SPDX-License-Identifier: Apache-2.0
"""Code that no graph of `torch.compile` holds."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.torchside.modes import constant_in_graphs


class Outside:
    """A function that runs outside of the graph that is being traced, which ends before it.

    With ``fullgraph=True`` torch says that there would be two. `torch.export` has one graph alone:
    a caller refuses there.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self._kept_out: list[Callable] = []

    def __call__(self, *arguments: Any) -> Any:
        """Run it while a graph is traced."""
        self._keep_out()
        return self._kept_out[0](*arguments)

    @constant_in_graphs
    def _keep_out(self) -> None:
        """To keep a function out of graphs loads the compiler, so a graph does it."""
        if not self._kept_out:
            self._kept_out.append(torch.compiler.disable(self._function))
