# SPDX-License-Identifier: Apache-2.0
"""Low-precision Transformer training and inference.

Importing this package imports nothing else: take `transformer_engine.pytorch` for PyTorch modules,
`transformer_engine.jax` for JAX and `transformer_engine.common` for recipes. As attributes they are
imported when they are asked for, as programs test with ``hasattr``.
"""

from typing import Any

__version__ = "2.20.2"

_SUBPACKAGES = ("common", "debug", "jax", "plugin", "pytorch")


def __getattr__(name: str) -> Any:
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        if error.name not in ("torch", "jax"):
            raise
        # hasattr() answers False where PyTorch, or JAX, is not installed
        raise AttributeError(f"{__name__}.{name}: {error}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
