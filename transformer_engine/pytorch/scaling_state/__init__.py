# SPDX-License-Identifier: Apache-2.0
"""Scales and histories of amaxes: where they lie, who updates them, which region is in force."""
