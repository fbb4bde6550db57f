# SPDX-License-Identifier: Apache-2.0
"""Programs on a device of a third party: models that train and generate, all kinds of attention."""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from comparators import assert_bits
from devices.beside_cpu import (
    NO_DROPOUT,
    assert_as_on_the_cpu,
    on_the_cpu,
    ran,
    region,
)
from pytorch.helpers import assert_same_bits
from thinning import one_each
from tols import BF16, E4M3, F32, GELU_GAIN, tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.optimizers import FusedAdam

pytestmark = pytest.mark.npu

HIDDEN, HEADS, LENGTH, BATCH, WORDS = 32, 4, 16, 2, 24


def test_the_program_of_the_readme(npu):
    """Nothing in it names a device."""
    _core.reset_counters()
    model = te.Linear(768, 3072, bias=True)
    x = torch.randn(64, 768, device=model.weight.device)
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID)
    with te.autocast(enabled=True, recipe=recipe):
        y = model(x)
    y.sum().backward()
    assert y.device == model.weight.grad.device == npu
    assert ran() == {"npu"}
    assert _core.counters()["emulated.tensor"] == 2  # the input has no gradient


def test_the_quick_start(npu, monkeypatch):
    """A layer built five ways is one function, in FP8 too but for its casts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import quickstart

    _core.reset_counters()
    sizes = ["--hidden", "64", "--heads", "4", "--seq", "16", "--batch", "2", "--iters", "1"]
    _, *ways, fp8 = quickstart.main(["--device", str(npu), *sizes])
    for way in ways:
        assert way["difference"] ** 2 < GELU_GAIN * 9 * (tol("sum", F32, 256) + tol("gelu", F32))
    assert 0 < fp8["difference"] ** 2 < GELU_GAIN * 8 * tol("quantize", E4M3)
    assert ran() == {"npu"}


# ---- a language model ----------------------------------------------------------------------------


class Gpt(torch.nn.Module):
    """Two layers between an embedding and a head; predicts the next word."""

    def __init__(self, **options):
        super().__init__()
        options = {"device": "cpu", "params_dtype": BF16} | options
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN, dtype=BF16)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                HIDDEN, 2 * HIDDEN, HEADS, num_gqa_groups=2, layer_number=number,
                self_attn_mask_type="causal", attn_input_format="bshd",
                normalization="RMSNorm", activation="swiglu", **options,
            )
            for number in (1, 2)
        )  # fmt: skip
        self.norm = te.RMSNorm(HIDDEN, device="cpu", dtype=BF16)
        self.head = te.Linear(HIDDEN, WORDS, device="cpu", params_dtype=BF16)
        rotary = te.RotaryPositionEmbedding(HIDDEN // HEADS)
        self.register_buffer("angles", rotary(2 * LENGTH).cpu())

    def forward(self, words, cache=None):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, inference_params=cache)
        return self.head(self.norm(x))


def losses_of(model, texts, recipe):
    """Losses of a step of FusedAdam for each batch of texts [batch, length + 1]."""
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    found = []
    for text in texts:
        with region(recipe):
            out = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).cpu()


TRAINED = ("none", "delayed", "current", "block", "mxfp8")
LOSSES = [
    *((recipe, 16 if recipe == "delayed" else 8, 0.1) for recipe in TRAINED),
    *(
        pytest.param(recipe, 50, dropout, marks=pytest.mark.nightly)
        for recipe in TRAINED
        for dropout in (0.0, 0.1)
    ),
]


@pytest.mark.parametrize(("recipe", "steps", "dropout"), LOSSES)
def test_losses_are_those_of_the_cpu(npu, recipe, steps, dropout):
    """In each step, with the same dropouts, and they become smaller."""
    texts = (torch.arange(LENGTH + 1) + torch.randint(WORDS, (steps, BATCH, 1))) % WORDS
    model = Gpt(hidden_dropout=dropout, attention_dropout=dropout)
    there, seed = copy.deepcopy(model).to(npu), int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    with on_the_cpu():
        expected = losses_of(model, texts, recipe)
    te.reset()
    torch.manual_seed(seed)
    found = losses_of(there, texts.to(npu), recipe)
    assert_bits(found, expected)
    assert found[-4:].mean() < found[:4].mean() / (1 if steps == 8 else 2)


@one_each(recipe=["none", "delayed"], paged=[False, True])
def test_generation(npu, paged, recipe):
    """Words that a cache generates are those of the CPU, and those of the whole text again."""
    model, prompt = Gpt().eval(), torch.randint(WORDS, (BATCH, 5))

    @torch.no_grad()
    def generate(model, words, device):
        options = {"is_paged": True, "page_size": 4} if paged else {}
        cache = te.InferenceParams(BATCH, 2 * LENGTH, 2, HIDDEN // HEADS, BF16, device=device,
                                   **options)  # fmt: skip
        given, outs = words.to(device), []
        for _ in range(6):
            cache.pre_step(OrderedDict((row, given.shape[1]) for row in range(BATCH)))
            with region(recipe):
                outs.append(model(given, cache)[:, -1].cpu())
            given = outs[-1].argmax(-1, keepdim=True).to(device)
        return outs

    there = copy.deepcopy(model).to(npu)
    with on_the_cpu():
        expected = generate(model, prompt, "cpu")
    te.reset()
    _core.reset_counters()
    assert_same_bits(generate(there, prompt, npu), expected)
    assert ran() == {"npu"}


# ---- attention -----------------------------------------------------------------------------------


KEYS = LENGTH + 4
LENGTHS = [3, LENGTH]
ATTENTIONS = {
    "plain": ({}, {}),
    "causal": ({"attn_mask_type": "causal"}, {}),
    "causal at the end": ({"attn_mask_type": "causal_bottom_right"}, {}),
    "groups": ({"num_gqa_groups": 2}, {}),
    "window": ({"window_size": (3, 2)}, {}),
    "causal window": ({"attn_mask_type": "causal", "window_size": (3, 0)}, {}),
    "alibi": ({"attn_mask_type": "causal"}, {"core_attention_bias_type": "alibi"}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias"}),
    "bias before": ({}, {"core_attention_bias_type": "pre_scale_bias"}),
    "softcap": ({"softcap": 2.0}, {}),
    "off by one": ({"softmax_type": "off-by-one"}, {}),
    "sink": ({"softmax_type": "learnable"}, {}),
    "padding": ({"attn_mask_type": "padding"}, {}),
    "padding causal": ({"attn_mask_type": "padding_causal"}, {}),
    "mask": ({"attn_mask_type": "arbitrary"}, {}),
    "dropout": ({"attention_dropout": 0.3}, {}),
    "batch first": ({"qkv_format": "bshd"}, {}),
    "packed": ({"qkv_format": "thd", "attn_mask_type": "padding_causal"}, {}),
    "largest score": ({"return_max_logit": True}, {}),
    "core checkpoint": ({}, {"checkpoint_core_attention": True}),
}


def given_of(name, options, call, device):
    """What a call of a kind of attention is given besides queries, keys and values."""
    kind = options.get("attn_mask_type", "no_mask")
    lengths = torch.tensor(LENGTHS, device=device, dtype=torch.int32)
    more = dict(call)
    if "bias" in name:
        more["core_attention_bias"] = torch.linspace(-1, 1, KEYS, device=device).expand(
            1, HEADS, LENGTH, KEYS).to(BF16)  # fmt: skip
    if kind == "arbitrary":
        places = torch.arange(KEYS, device=device)
        more["attention_mask"] = (places % 3 == 1).expand(BATCH, 1, LENGTH, KEYS)
    elif options.get("qkv_format") == "thd":
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        more |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": LENGTH,
                 "max_seqlen_kv": LENGTH}  # fmt: skip
    elif "padding" in kind:
        more["attention_mask"] = tuple(
            torch.arange(n, device=device) >= lengths[:, None, None, None] for n in (LENGTH, KEYS)
        )
    return more


class Attention(torch.nn.Module):
    """A call of a kind of attention on a tensor that has queries, keys and values."""

    def __init__(self, name):
        super().__init__()
        self.name, (self.options, self.call) = name, ATTENTIONS[name]
        options = {"attn_mask_type": "no_mask", "num_gqa_groups": HEADS} | self.options
        self.groups = options["num_gqa_groups"]
        self.core = te.DotProductAttention(HEADS, HIDDEN // HEADS, **options)

    def forward(self, x):
        """Of [tokens, batch, 3 HIDDEN]."""
        form = self.options.get("qkv_format", "sbhd")
        parts = x.unflatten(-1, (3 * HEADS, -1)).split(HEADS, -2)
        query, key, value = (parts[0][:LENGTH], *(t[..., : self.groups, :] for t in parts[1:]))
        if form == "thd":
            rows = sum(LENGTHS)
            query, key, value = (t.flatten(0, 1)[:rows] for t in (query, key, value))
        elif form == "bshd":
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        given = given_of(self.name, self.options, self.call, x.device)
        out = self.core(query, key, value, **given)
        return out[0] if isinstance(out, tuple) else out


@one_each(recipe=["delayed", "current"], name=ATTENTIONS)
def test_attention(npu, name, recipe, monkeypatch):
    """Every kind of attention in FP8; what FP8 has no operator for, too."""
    monkeypatch.setenv("TE_UNFUSED_DPA_EMULATE_FP8", "1")

    def run(model, x, step):
        del step
        with te.autocast(recipe=FP8_ATTENTION[recipe]()):
            return model(x)

    inputs = [torch.randn(KEYS, BATCH, 3 * HIDDEN).to(BF16) for _ in "ab"]
    assert_as_on_the_cpu(Attention(name).cpu(), inputs, run, npu)


FP8_ATTENTION = {
    "delayed": lambda: recipes.DelayedScaling(fp8_dpa=True, amax_history_len=2),
    "current": lambda: recipes.Float8CurrentScaling(fp8_dpa=True),
}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_between_modules(npu, recipe):
    """Attention takes FP8 from its projections, and gives it."""
    made = FP8_ATTENTION[recipe]()
    made.fp8_mha = True

    def run(model, x, step):
        del step
        with te.autocast(recipe=made):
            return model(x)

    layer = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device="cpu", params_dtype=BF16,
                                **NO_DROPOUT)  # fmt: skip
    assert_as_on_the_cpu(
        layer, [torch.randn(LENGTH, BATCH, HIDDEN).to(BF16) for _ in "ab"], run, npu
    )
