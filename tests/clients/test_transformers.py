# SPDX-License-Identifier: Apache-2.0
"""A Llama of transformers with its linear layers and norms swapped: train, generate, save, load."""

import copy
import subprocess
import sys

import pytest
import torch
from clients.released import client
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits, counted, states_of
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

transformers = client("transformers")

LINEARS = 2 * 7  # of two layers: q, k, v, o, gate, up, down
KEY = "_extra_state"


class Llama(transformers.LlamaForCausalLM):
    """Its layers are ours; the head stays, and may be tied to the embedding."""

    def __init__(self, config):
        super().__init__(config)
        te.convert(self, skip="lm_head", strict=True)


def configuration(**changes):
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return transformers.LlamaConfig(**{**settings, **changes})


def recipe():
    return DelayedScaling(amax_history_len=4)


def train(model, steps=4, learning_rate=3e-3):
    """Train on one batch in FP8; return the losses."""
    ids = (torch.arange(32, device=model.device) * 5 % 64).view(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for _ in range(steps):
        with te.autocast(recipe=recipe()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_swapped_model_computes_the_same(device):
    original = transformers.LlamaForCausalLM(configuration())
    model = Llama(configuration())
    assert sum(isinstance(m, te.Linear) for m in model.modules()) == LINEARS
    assert sum(isinstance(m, te.RMSNorm) for m in model.modules()) == 5
    model.load_state_dict(original.state_dict(), strict=True)
    model = model.to(device).eval()
    ids = torch.randint(64, (2, 16))
    with torch.no_grad():
        exact = original.double().eval()(ids).logits
        found = model(ids.to(device)).logits
    # a path through two layers passes eight products of up to 128 terms, the last of 64
    assert_nmse(found.cpu(), exact, 32 * tol("sum", torch.float32, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_training_is_fp8_and_the_loss_falls(device, dtype, tied):
    model = Llama(configuration(tie_word_embeddings=tied)).to(device, dtype)
    with counted() as gemms:
        losses = train(model, 10)
    assert gemms.fp8 == 10 * 3 * LINEARS and gemms.other == 0
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_changes_no_bit(device):
    plain = Llama(configuration()).to(device).train()
    recomputed = Llama(configuration()).to(device).train()
    recomputed.load_state_dict(plain.state_dict())
    recomputed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, expected = [
        (train(model), copy.deepcopy(dict(model.state_dict()))) for model in (recomputed, plain)
    ]
    assert found[0] == expected[0]
    assert_same_bits(found[1], expected[1])


def test_generation_with_a_cache_in_fp8(device):
    model = Llama(configuration()).to(device)
    train(model, 30, 1e-2)
    model.eval()
    prompt = (torch.arange(6, device=device) * 5 % 64).view(1, 6)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    with counted() as gemms, torch.no_grad(), te.autocast(recipe=recipe()):
        found = model.generate(prompt, **options)
    assert gemms.fp8 == 6 * LINEARS and gemms.other == 0
    assert found[0].tolist() == (torch.arange(12) * 5 % 64).tolist()  # what it was trained on
    with torch.no_grad():
        assert_same_bits(model.generate(prompt, **options), found)  # the same in high precision


@pytest.mark.parametrize("inside", [False, True], ids=["region-outside", "region-inside"])
def test_compiled_training_equals_eager(device, inside):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "eager"
    eager, other = (Llama(configuration(num_hidden_layers=1)).to(device) for _ in range(2))
    other.load_state_dict(eager.state_dict())
    fp8 = recipe()

    def step(ids):
        if not inside:
            return other(input_ids=ids, labels=ids).loss
        with te.autocast(recipe=fp8):
            return other(input_ids=ids, labels=ids).loss

    compiled = torch.compile(step, backend=backend)
    ids = torch.randint(64, (2, 16), device=device)
    for _ in range(3):
        with te.autocast(recipe=fp8):
            expected = eager(input_ids=ids, labels=ids).loss
        with te.autocast(recipe=fp8, enabled=not inside), counted() as gemms:
            loss = compiled(ids)
        assert gemms.fp8 == LINEARS // 2 and gemms.other == 0
        expected.backward()
        loss.backward()
        if device == "cpu":
            assert_same_bits(loss.detach(), expected.detach())
        else:  # inductor rounds otherwise between the layers, and FP8 may round that up or down
            bound = tol("quantized_layer", torch.float8_e4m3fn)
            assert_nmse(loss.detach().cpu(), expected.detach().cpu().double(), bound)
    assert all(state is not None for state in states_of(other))


# ---- files ---------------------------------------------------------------------------------------


def load(kind, folder, **options):
    """Load a model; transformers must have nothing to report."""
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "several"])
def test_what_is_saved_loads_without_a_report(device, tmp_path, tied, shards):
    model = Llama(configuration(tie_word_embeddings=tied)).to(device)
    train(model)
    model.save_pretrained(tmp_path, **({"max_shard_size": "50KB"} if shards else {}))
    te.reset()  # as in a new process
    again = load(Llama, tmp_path).to(device)
    assert_same_bits(dict(again.state_dict()), {k: v for k, v in saved(tmp_path, tied).items()})
    assert all(state is not None for state in states_of(again))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def saved(folder, tied):
    """Tensors of a folder of save_pretrained, by key; the head too where it is tied."""
    import safetensors.torch

    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def test_a_loaded_model_goes_on_with_its_scales(device, tmp_path):
    model = Llama(configuration()).to(device)
    train(model)
    model.save_pretrained(tmp_path)
    expected = train(model.train())
    te.reset()  # as in a new process
    assert train(load(Llama, tmp_path).to(device).train()) == expected


@pytest.mark.parametrize("trained_before", [False, True], ids=["new-program", "fp8-program"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoints_of_the_original_class_load(device, tmp_path, trained_before, dtype):
    original = transformers.LlamaForCausalLM(configuration())
    original.save_pretrained(tmp_path)
    if trained_before:
        train(Llama(configuration()).to(device), 1)
    model = load(Llama, tmp_path, dtype=dtype).to(device)
    expected = {k: v.to(device, dtype) for k, v in original.state_dict().items()}
    assert_same_bits(te.without_scaling_state(dict(model.state_dict())), expected)
    with counted() as gemms:
        train(model, 1)
    assert gemms.fp8 == 3 * LINEARS and gemms.other == 0


def test_the_original_class_loads_what_was_saved_without_scales(device, tmp_path):
    model = Llama(configuration()).to(device)
    train(model, 1)
    weights = te.without_scaling_state(model.state_dict())
    model.save_pretrained(tmp_path, state_dict=dict(weights))  # which it empties
    plain = load(transformers.LlamaForCausalLM, tmp_path).to(device)
    assert_same_bits(dict(plain.state_dict()), dict(weights))


def test_a_model_that_was_loaded_is_converted(device, tmp_path):
    transformers.LlamaForCausalLM(configuration()).save_pretrained(tmp_path)
    model = load(transformers.LlamaForCausalLM, tmp_path).to(device)
    te.convert(model, skip="lm_head")
    with counted() as gemms:
        train(model, 1)
    assert gemms.fp8 == 3 * LINEARS and gemms.other == 0


def test_transformers_comes_without_this_package(tmp_path):
    """What imports transformers does not pay for us."""
    script = "import sys, transformers; sys.exit('transformer_engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
