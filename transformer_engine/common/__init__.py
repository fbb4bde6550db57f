# SPDX-License-Identifier: Apache-2.0
"""Code that every framework's front end shares: recipes, configuration. Standard library only."""

from transformer_engine.common import absent, config, recipe

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["config", "decode_cudnn_version", "recipe", *absent.names_of(__name__)]


def decode_cudnn_version(encoded_version: int) -> tuple[int, int, int]:
    """(major, minor, patch) of a version of cuDNN as that library tells it, say 91900."""
    major = 10000 if encoded_version >= 90000 else 1000  # the encoding changed with version 9
    return encoded_version // major, encoded_version % major // 100, encoded_version % 100
