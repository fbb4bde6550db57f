# SPDX-License-Identifier: Apache-2.0
"""Requirements of `transformer_engine.pytorch`, and how to install them."""

import importlib.util
import re
import sys

OLDEST_TORCH = (2, 10)  # the first with the exchange of tensors that `_core` is built on
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def check_requirements() -> None:
    """Import torch and look for the extension.

    ImportError where there is no torch, or one that is too old, or the extension was not built; the
    message has the command that helps.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    install = (
        f'{sys.executable} -m pip install "torch>={oldest}"'
        f" (without a GPU: --index-url {CPU_INDEX} added to it)"
    )
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there and lacks something itself
            raise
        raise ImportError(
            f"transformer_engine.pytorch needs PyTorch, and this Python has none: {install}",
            name="torch",
        ) from error
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and tuple(map(int, version.groups())) < OLDEST_TORCH:
        raise ImportError(
            f"transformer_engine.pytorch needs PyTorch {oldest} or later and found"
            f" {torch.__version__}: {install}",
            name="torch",
        )
    if importlib.util.find_spec("transformer_engine._core") is None:
        raise ImportError(
            "transformer_engine._core, the native extension, was not built: run `make build` or"
            f" `{sys.executable} setup.py build_ext --inplace` in the source folder",
            name="transformer_engine._core",
        )
