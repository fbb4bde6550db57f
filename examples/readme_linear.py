# SPDX-License-Identifier: Apache-2.0
"""The smallest program: one layer, one forward and one backward in FP8.

It makes the calls that users of FP8 libraries know from their first page, with a recipe that is
spelled out, under both names of the region. Runs on the GPU where there is one, else on the CPU.

    python examples/readme_linear.py
"""

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

IN_FEATURES, OUT_FEATURES, TOKENS = 768, 3072, 2048


def step(tokens: int = TOKENS, old_names: bool = False) -> dict[str, torch.Tensor | int]:
    """Run one forward and one backward; return the tensors and the number of FP8 GEMMs."""
    model = te.Linear(IN_FEATURES, OUT_FEATURES, bias=True)
    inp = torch.randn(tokens, IN_FEATURES, device=model.weight.device)
    # Every argument of a recipe is optional. E4M3 here also holds the gradients.
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    if old_names:
        region = te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe)
    else:
        region = te.autocast(enabled=True, recipe=fp8_recipe)

    with te.counting() as ran:
        with region:  # the forward alone belongs inside
            out = model(inp)
        loss = out.sum()
        loss.backward()

    return {
        "out": out.detach(),
        "weight_grad": model.weight.grad,
        "bias_grad": model.bias.grad,
        "fp8_gemms": ran.fp8_gemms,
        "other_gemms": ran.other_gemms,
    }


def main() -> None:
    for old_names in (False, True):
        done = step(old_names=old_names)
        out, grad = done["out"], done["weight_grad"]
        print(f"{'fp8_autocast' if old_names else 'autocast'} on {out.device}:")
        print(f"  output {tuple(out.shape)}, weight gradient {tuple(grad.shape)}")
        print(f"  GEMMs: {done['fp8_gemms']} in FP8, {done['other_gemms']} in high precision")


if __name__ == "__main__":
    main()
