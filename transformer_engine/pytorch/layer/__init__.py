# SPDX-License-Identifier: Apache-2.0
"""Layers of modules: `MultiheadAttention`, `TransformerLayer`, and their plans."""
