# SPDX-License-Identifier: Apache-2.0
"""Export to ONNX: only its disabled form is built."""

from contextlib import AbstractContextManager

from transformer_engine.common import absent
from transformer_engine.pytorch.torch_version import torch_version

__getattr__, __dir__ = absent.attach(globals())

TORCH_MAJOR, TORCH_MINOR = torch_version()[:2]


def onnx_export(enabled: bool = False) -> AbstractContextManager:
    """Make modules exportable inside: only the disabled form, which changes nothing, is built.

    NotImplementedError where enabled.
    """
    return absent.disabled("pytorch.export.onnx_export", enabled)


def is_in_onnx_export_mode() -> bool:
    """Return whether modules run in a form that ONNX knows: never."""
    return False
