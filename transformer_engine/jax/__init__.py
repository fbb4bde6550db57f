# SPDX-License-Identifier: Apache-2.0
"""JAX on the C library."""
