# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor is as it was when something was made of it."""

import weakref
from typing import NamedTuple

from torch import Tensor

from transformer_engine.pytorch.torchside.modes import is_traced_or_faked


class Version(NamedTuple):
    """A tensor as it is, without keeping it: another one has other values at the same version."""

    data: weakref.ref
    count: int  # changes with the values; those of inference mode do not tell
    place: int  # changes where ``data.data`` is assigned, which counts as no change

    def __reduce__(self) -> tuple:
        """Pickle as None: what is read again is another tensor."""
        return type(None), ()


def version_of(data: Tensor) -> Version:
    """The version of a tensor now."""
    place = 0 if type(data) is not Tensor or is_traced_or_faked() else data.data_ptr()
    return Version(weakref.ref(data), -1 if data.is_inference() else data._version, place)


def is_of(version: Version | None, data: Tensor) -> bool:
    """Return whether a tensor is the one of a version, and has not changed."""
    if not isinstance(version, Version) or version.data() is not data:
        return False
    return version[1:] == version_of(data)[1:]
