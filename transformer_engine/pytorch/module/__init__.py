# SPDX-License-Identifier: Apache-2.0
"""Modules of the package."""
