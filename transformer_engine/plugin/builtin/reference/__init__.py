# SPDX-License-Identifier: Apache-2.0
"""``reference.torch``: what operators compute, in plain torch.

Slow, and short enough to be read: the definition for whoever writes an implementation, with which
`plugin.check` compares. Arguments, results and errors are those of the module of the same name one
level up; results are cast by quantizers as those are. Sums are fp32; of float64 arguments all is
float64, results too: so `plugin.check` asks.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["defines"]


def defines(native: Callable) -> Callable[[Callable[[SimpleNamespace], Any]], Callable]:
    """Make a definition an implementation of an operator (decorator).

    It gets the arguments by name, as attributes of one object: those of the signature of `native`,
    but for the places of results that only some implementations take (`values.placed`).
    """
    signature = inspect.signature(native)
    places = signature.parameters.get("out")
    if places is not None and places.kind is places.KEYWORD_ONLY and places.default is None:
        own = [one for one in signature.parameters.values() if one is not places]
        signature = signature.replace(parameters=own)

    def wrap(definition: Callable[[SimpleNamespace], Any]) -> Callable:
        @functools.wraps(native)
        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return definition(SimpleNamespace(**bound.arguments))

        run.__module__ = definition.__module__
        run.__doc__ = definition.__doc__ or native.__doc__
        run.__signature__ = signature
        return run

    return wrap
