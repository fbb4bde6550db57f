# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT: a stack of `te.TransformerLayer` between an embedding and a head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from layout import Layout

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

# Scales of delayed scaling begin at 1, too small for the first gradients of a large batch, which
# would round to zero: what no slot has recorded yet is measured before it is cast.
RECIPES = {
    "delayed": partial(DelayedScaling, measure_first=True),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "row": Float8RowScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
WIDE_HEADS = {"nvfp4"}
"""Recipes that leave the head in high precision: four bits are too few for the logits."""
VOCABULARY = 256
LINEARS = 4  # of a Transformer layer: query-key-value, projection, the two of the MLP
INIT_STD = 0.02


@dataclass(frozen=True)
class Config:
    """All that decides the outcome of a run, besides its precision."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    warmup: float
    final_lr: float
    dropout: float
    valid_windows: int
    seed: int
    recipe: str


class GPT(torch.nn.Module):
    """Bytes, int64 [length, n], to features, [length, n, hidden], and these to logits.

    Over several ranks both are this rank's part of them.
    """

    def __init__(self, config: Config, device: torch.device, layout: Layout | None = None) -> None:
        super().__init__()
        hidden = config.hidden
        self.layout = layout or Layout()

        def init(weight: torch.Tensor) -> None:
            torch.nn.init.normal_(weight, std=INIT_STD)

        def init_output(weight: torch.Tensor) -> None:  # of what is added to the residual stream
            torch.nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * config.layers))

        self.embedding = torch.nn.Embedding(VOCABULARY, hidden, device=device)
        init(self.embedding.weight.data)
        rotary = te.RotaryPositionEmbedding(hidden // config.heads)
        self.register_buffer("angles", rotary(config.seq).to(device), persistent=False)
        self.layers = torch.nn.ModuleList()
        for number in range(config.layers):
            layer = te.TransformerLayer(
                hidden,
                4 * hidden,
                config.heads,
                hidden_dropout=config.dropout,
                attention_dropout=config.dropout,
                init_method=init,
                output_layer_init_method=init_output,
                layer_number=number + 1,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                params_dtype=torch.float32,
                device=device,
                **self.layout.layer_options,
            )
            # One whole layer is in memory at a time.
            self.layers.append(self.layout.place(layer, f"layers.{number}"))
        self.norm = te.LayerNorm(hidden, device=device)
        self.head = te.Linear(hidden, VOCABULARY, init_method=init, device=device)
        self.linears = LINEARS * config.layers + 1

    def forward(
        self, window: torch.Tensor, cache: te.InferenceParams | None = None
    ) -> torch.Tensor:
        """Return the features of each byte, made of it and those before; `head` makes logits.

        With a cache the bytes before are those of its sequences, and the window is new.
        """
        x = self.embedding(window)
        length = len(window) * self.layout.cp * self.layout.tp
        angles = self.angles[:length] if cache is None else self.angles
        mask = "causal" if cache is None else "padding_causal"
        for layer in self.layers:
            x = layer(
                x, self_attn_mask_type=mask, inference_params=cache, rotary_pos_emb=angles
            )  # fmt: skip
        return self.norm(x)


class InPrecision(torch.nn.Module):
    """Bytes to logits in fp32, in the precision of a run: the one place where runs differ.

    The recipes' own format has gradients in E5M2, whose range suits most of them.  Those of the
    logits are probabilities and need digits, not range, so the head has E4M3 both ways, or is in
    high precision.

    Parameters
    ----------
    model : GPT
        The model.
    precision : str
        ``"fp8"``, ``"fp32"`` or ``"bf16"``.
    recipe : str
        One of `RECIPES`, for ``"fp8"``.
    """

    def __init__(self, model: GPT, precision: str, recipe: str) -> None:
        super().__init__()
        self.model = model
        self.fp8 = precision == "fp8"
        self.kind = model.embedding.weight.device.type
        # FP8 products stand among bf16 operations on a GPU, among fp32 ones on a CPU.
        self.bf16 = precision == "bf16" or (self.fp8 and self.kind == "cuda")
        self.recipe = RECIPES[recipe]()
        self.head_recipe = RECIPES[recipe](fp8_format=Format.E4M3)
        self.quantized_head = self.fp8 and recipe not in WIDE_HEADS

    def forward(self, window: torch.Tensor, last_only: bool = False) -> torch.Tensor:
        """Predict what follows each byte of a window [length, n], or its last ones."""
        with torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.bf16):
            with te.autocast(enabled=self.fp8, recipe=self.recipe):
                features = self.model(window)
            with te.autocast(enabled=self.quantized_head, recipe=self.head_recipe):
                logits = self.model.head(features[-1:] if last_only else features)
        return logits.float()
