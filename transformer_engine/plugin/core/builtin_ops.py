# SPDX-License-Identifier: Apache-2.0
"""`register_builtins`, under the fork's path."""

from transformer_engine.plugin.builtin import register_builtins

__all__ = ["register_builtins"]
