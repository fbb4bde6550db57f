# SPDX-License-Identifier: Apache-2.0
"""Policies of `jax.checkpoint`: which results are saved and not computed again."""

from jax import checkpoint_policies as policies

from transformer_engine.jax.linear import GEMM_NAME

te_gemms_saveable = policies.save_only_these_names(GEMM_NAME)
"""Results of the products of this library's layers."""
dots_and_te_gemms_with_no_batch_dims = policies.save_from_both_policies(
    policies.dots_with_no_batch_dims_saveable, te_gemms_saveable
)
"""These, and results of other products that have no dims of a batch."""
checkpoint_dots_and_te_gemms = policies.save_from_both_policies(
    policies.checkpoint_dots, te_gemms_saveable
)
"""These, and results of all other products."""
