# SPDX-License-Identifier: Apache-2.0
"""Tools for whole models: convert them, see what ran and why, find values that are not finite.

Their names stand in `transformer_engine.pytorch`. Nothing that computes imports from here.
"""
