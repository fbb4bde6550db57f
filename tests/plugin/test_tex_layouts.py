# SPDX-License-Identifier: Apache-2.0
"""Copies between layouts of `transformer_engine_torch`, and those of context parallelism: refusals.

What they copy, `plugin.check` says.
"""

import pytest
import torch
from buffers import normal
from tex_cases import Operators
from tols import BF16

native = Operators("default.native")


def test_refused_projections(rng, device):
    whole = normal(rng, (5, 2, 3, 3 * 8), BF16, device)
    made = native.fa_prepare_fwd(whole[..., :8])
    with pytest.raises(ValueError, match="fa_prepare_fwd: qkvi"):
        native.fa_prepare_fwd(whole[..., :8].contiguous())
    with pytest.raises(ValueError, match="fa_prepare_bwd: q, k, v"):
        native.fa_prepare_bwd(made[0], made[1][:1], made[2])
    with pytest.raises(ValueError, match="swap_first_dims: out"):
        native.swap_first_dims(whole, out=whole)


def test_refused_groups_of_rows(device):
    x, out = (torch.ones(n, 4, dtype=BF16, device=device) for n in (9, 16))
    rows = [2, 0, 7]
    with pytest.raises(ValueError, match="fused_multi_row_padding: groups"):
        native.fused_multi_row_padding(x, out, rows, [1, 7, 8])
    with pytest.raises(ValueError, match="output of 16 rows"):
        native.fused_multi_row_padding(x, out, rows, [4, 4, 9])


def test_refused_halves(device):
    cu = torch.tensor([0, 4, 12, 14], dtype=torch.int32, device=device)
    x = torch.ones(14, 2, 4, device=device)
    with pytest.raises(ValueError, match="half_idx=2"):
        native.thd_read_half_tensor(x, cu, 2)
    with pytest.raises(ValueError, match="thd_grad_correction: first_half"):
        native.thd_grad_correction(x, x, cu, "none", "none")
