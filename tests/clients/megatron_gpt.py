# SPDX-License-Identifier: Apache-2.0
"""A small GPT of megatron-core's TE layer spec: made, trained and differentiated, on one rank."""

import torch

import transformer_engine.pytorch as te

STEPS = 10
VOCABULARY, LENGTH, BATCH, LAYERS = 128, 64, 4, 2
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16}
DELAYED["fp8_amax_compute_algo"] = "max"
LLAMA = {
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "num_query_groups": 4,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}


def config_of(device, **options):
    """A small model's configuration, in bf16."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": LAYERS,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 8,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": device == "cpu",
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": False,
    }
    return TransformerConfig(**{**settings, **options})


def seed(device, te_tracker=False):
    """Begin the random numbers again, those of the tracker that megatron-core keeps too."""
    first = torch.initial_seed()
    torch.manual_seed(first)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(first, te_rng_tracker=te_tracker, force_reset_rng=True)


def make_model(device, te_tracker=False, position="learned_absolute", **options):
    """A GPTModel on the device, in the wrapper that converts inputs and outputs."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.module import Float16Module

    seed(device, te_tracker)
    config = config_of(device, **options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type=position,
        share_embeddings_and_output_weights=True,
    )
    return Float16Module(config, model.to(device))


def batch_of(device):
    """Tokens in which each is the one before plus 3, so that there is something to learn."""
    start = torch.arange(BATCH, device=device)[:, None] * 7
    line = (start + 3 * torch.arange(LENGTH + 1, device=device)) % VOCABULARY
    positions = torch.arange(LENGTH, device=device).expand(BATCH, LENGTH)
    return line[:, :-1].contiguous(), positions.contiguous(), line[:, 1:].contiguous()


def first_microbatch(model):
    """Tell each layer that the weights are new, as megatron's schedules do."""
    for module in model.modules():
        if hasattr(module, "set_is_first_microbatch"):
            module.set_is_first_microbatch()


def loss_of(model, device):
    tokens, positions, labels = batch_of(device)
    return model(tokens, positions, None, labels=labels).float().mean()


def train(model, device, steps=STEPS, lr=1e-3, after_backward=None):
    """Train with torch's AdamW: the losses. `after_backward` is called with the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        first_microbatch(model)
        optimizer.zero_grad()
        loss = loss_of(model, device)
        loss.backward()
        missing = [n for n, p in model.named_parameters() if p.grad is None and p.requires_grad]
        assert not missing, f"no gradient: {missing}"
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def gemms():
    """(GEMMs of linear layers with FP8 operands, with others) since the counters began."""
    counters = te.counters()
    return counters.fp8_gemms, counters.other_gemms


def trained(device, after=None, **options):
    """Facts of a training run; `after` is called with the model at the end."""
    te.reset()
    model = make_model(device, **options)
    te.reset_counters()
    losses = train(model, device)
    fp8, other = gemms()
    if after is not None:
        after(model)
    return {"losses": losses, "fp8": fp8, "other": other, "linear_layers": linear_layers(model)}


def linear_layers(model):
    return sum(isinstance(m, te.Linear | te.LayerNormLinear) for m in model.modules())


def gradients(device, **options):
    """Gradients of the second step, by name: the first has scales of 1."""
    te.reset()
    model = make_model(device, **options)
    for _ in range(2):
        first_microbatch(model)
        model.zero_grad()
        loss_of(model, device).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def worst(found, expected):
    """Largest normalised squared error of the gradients: (it, name); 0 where the bits are equal."""
    errors = [
        (((found[name] - exact).square().sum() / exact.square().sum()).item(), name)
        for name, exact in expected.items()
        if not torch.equal(found[name], exact)
    ]
    return max(errors, default=(0.0, ""))
