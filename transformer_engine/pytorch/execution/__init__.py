# SPDX-License-Identifier: Apache-2.0
"""Plans and operators as torch sees them: autograd, custom operators, random pairs, recompute."""
