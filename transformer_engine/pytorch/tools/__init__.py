# SPDX-License-Identifier: Apache-2.0
"""What users call on a whole model: convert it, see what it ran and why, find what is not finite.

Their names stand in `transformer_engine.pytorch`. Nothing that computes imports from here.
"""
