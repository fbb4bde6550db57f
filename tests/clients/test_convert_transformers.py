# SPDX-License-Identifier: Apache-2.0
"""`te.convert` on models of transformers as they are: the same logits, names and ties as before."""

import copy

import pytest
import torch
from clients.released import client
from comparators import assert_nmse
from tols import tol

import transformer_engine.pytorch as te

transformers = client("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
# Architecture, its settings, whether the factor of its norms is 1 + gamma; None: torch's LayerNorm.
MODELS = {
    "Llama": (SMALL, False),
    "Mistral": (SMALL, False),
    "Qwen2": (SMALL, False),
    "Qwen3": (SMALL, False),
    "Phi3": (SMALL, False),
    "Olmo2": (SMALL, False),
    "Granite": (SMALL, False),
    "Gemma": (SMALL, True),
    "Gemma2": (SMALL, True),
    "T5": (T5, False),
    "GPTNeoX": ({**SMALL, "num_key_value_heads": 4}, None),
    "OPT": ({**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, None),
}


def build(name):
    settings, zero_centered = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**settings)
    kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    model = getattr(transformers, name + kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no norm at its first values
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, zero_centered


def arguments(name):
    tokens = torch.randint(2, 60, (2, 16))
    return {"input_ids": tokens, "labels": tokens} if name == "T5" else {"input_ids": tokens}


@pytest.mark.parametrize("name", MODELS)
def test_converted_as_it_is(name):
    model, zero_centered = build(name)
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    te.convert(model, strict=True)
    kinds = {type(m) for m in model.modules()}
    assert te.Linear in kinds and torch.nn.Linear not in kinds
    assert not [k for k in kinds if k.__name__.endswith(("RMSNorm", "LayerNorm"))
                and not k.__module__.startswith("transformer_engine")]  # fmt: skip
    norms = [m for m in model.modules() if isinstance(m, te.RMSNorm)]
    assert (zero_centered is None) == (not norms)
    assert all(norm.zero_centered_gamma is zero_centered for norm in norms)
    assert list(model.state_dict()) == keys
    given = arguments(name)
    with torch.no_grad():
        found, wanted = model(**given).logits, plain(**given).logits
    assert_nmse(found, wanted.double(), 2 * tol("layer", torch.float32, SMALL["vocab_size"]))


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5"])
def test_trains_in_fp8(name):
    model, _ = build(name)
    te.convert(model.train(), skip="lm_head")
    assert type(model.lm_head) is torch.nn.Linear
    given = arguments(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    linears = sum(isinstance(m, te.Linear) for m in model.modules())
    losses = []
    for _ in range(3):
        with te.counting() as ran:
            with te.autocast():
                loss = model(**{"labels": given["input_ids"], **given}).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert (ran.fp8_gemms, ran.other_gemms) == (3 * linears, 0)
    assert losses[-1] < losses[0]
    with te.watch_finite(model), te.autocast():
        model(**given)
