# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel, released: what its recipes do to this package when they start.

They call `apply_te_patches()` (nemo_automodel/shared/te_patches.py of 0.7.0), which replaces parts
of `FusedAdam`. It runs in a process of its own, as it changes the package for good.
"""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam

seed, patched = int(sys.argv[1]), sys.argv[2] == "patched"
if patched:
    from nemo_automodel.shared.te_patches import apply_te_patches

    before = fused_adam.multi_tensor_applier
    apply_te_patches()
    apply_te_patches()  # recipes call it once each
    assert fused_adam.multi_tensor_applier is not before

torch.manual_seed(seed)
recipe = te.recipe.Float8CurrentScaling()
with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
    model = te.LayerNormMLP(32, 64, device="cpu")
empty = torch.nn.Parameter(torch.empty(0))  # as a rank has whose part of a shard is empty
optimizer = FusedAdam([*model.parameters(), empty], lr=1e-2, master_weights=True)
losses, x = [], torch.randn(16, 32)
for _ in range(6):
    with te.autocast(recipe=recipe):
        loss = (model(x) - x).square().mean()
    loss.backward()
    empty.grad = torch.zeros_like(empty)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
kinds = sorted({type(p).__name__ for p in model.parameters()})
print(json.dumps({"losses": losses, "kinds": kinds, "states": len(optimizer.state)}))
"""


def train(folder, seed, how):
    """Run the program: what it printed last."""
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed), how],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_its_patches_apply_and_change_no_number(fetched, request):
    folder, seed = fetched("nemo_automodel-0.7.0"), request.config.getoption("seed")
    plain, patched = (train(folder, seed, how) for how in ("plain", "patched"))
    assert plain == patched
    assert "Float8Tensor" in patched["kinds"]
    assert patched["losses"][-1] < patched["losses"][0]
