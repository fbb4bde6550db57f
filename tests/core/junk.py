# SPDX-License-Identifier: Apache-2.0
"""Values that are wrong as almost any argument, and the exceptions that may say so."""

import sys

import native
import torch
from native import ROWS, K, fresh_core

core = fresh_core()
STRANGE = native.strange_tensors()


def closed_context():
    context = core.Context(core.DEVICE_CPU)
    context.close()
    return context


JUNK = {
    "None": None,
    "-1": -1,
    "7": 7,
    "huge": 2**70,
    "-huge": -(2**70),
    "int64 max": 2**63 - 1,
    "int32 max": 2**31 - 1,
    "str": "no tensor",
    "surrogate": "\udc80",
    "bytes": b"x",
    "float": 1.5,
    "nan": float("nan"),
    "list": [1, 2],
    "dict": {"cast": 3},
    "object": object(),
    "class": torch.Tensor,
    "dtype": torch.complex64,
    "module": sys,
    "closed context": closed_context(),
    "context": core.Context(core.DEVICE_CPU),
    "scalar": torch.tensor(1.0),
    "empty": torch.zeros(0),
    "vector": torch.zeros(7),
    "int tensor": torch.zeros(ROWS, K, dtype=torch.int32),
    "uint8": torch.zeros(5, dtype=torch.uint8),
    "expanded": torch.zeros(()).expand(ROWS, K),
    "column stride": torch.zeros(K, ROWS).t(),
    "half": torch.zeros(ROWS, K, dtype=torch.float16),
    "high": torch.zeros(1, 1, 1, 2, 3),
    "negative bit": torch._neg_view(torch.zeros(ROWS, K)),
    **STRANGE,
}

ACCEPTED = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError, ImportError)
