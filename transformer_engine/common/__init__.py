# SPDX-License-Identifier: Apache-2.0
"""What every framework's front end shares: recipes and configuration. Standard library only."""

from transformer_engine.common import config, recipe

__all__ = ["config", "recipe"]
