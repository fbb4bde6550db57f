# SPDX-License-Identifier: Apache-2.0
"""`torch_version`."""

import re

import torch


def torch_version() -> tuple[int, ...]:
    """The release of torch in use, (major, minor, patch), to be compared with tuples."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
