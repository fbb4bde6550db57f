# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_megatron_ranks.py run: a GPT of megatron-core with tensor parallelism.

megatron-core makes the buffers of its own embeddings and losses on a GPU where there is sequence
parallelism. So on the CPU the whole model runs without that, and its decoder with it, between
layers of this file.
"""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from clients import megatron_gpt as gpt

import transformer_engine.pytorch as te


def use(folders):
    """Find megatron-core where it was fetched to, and the cases of one rank."""
    folders = [*folders, str(Path(__file__).parent)]
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    for name in ("models.gpt.gpt_layer_specs", "optimizer"):
        importlib.import_module(f"megatron.core.{name}")


def begin(device, ranks, seed):
    """Begin again, with tensor parallelism of so many ranks: the options of a configuration."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    te.reset()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.manual_seed(seed)
    if device == "cpu":  # its decoder forks the states of a tracker: ours has them on the CPU
        random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
        random.get_cuda_rng_tracker().add("model-parallel-rng", seed)
    return {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}


# ---- what ranks share ----------------------------------------------------------------------------


def part_of(name, parameter, whole, gated):
    """Part of a rank of a parameter's value or gradient, by what the parameter says of itself."""
    if parameter.shape == whole.shape:
        return whole
    assert parameter.tensor_model_parallel
    pieces = whole.chunk(2) if gated and "linear_fc1" in name else [whole]
    parts = [p.chunk(dist.get_world_size(), parameter.partition_dim) for p in pieces]
    return torch.cat([each[dist.get_rank()] for each in parts])


def load(model, state, gated):
    """Give a model its rank's part of the whole parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(name, parameter, state[name], gated))


def sum_gradients(model):
    """Of parameters that see a rank's tokens or heads, as megatron-core does under its DDP."""
    for name, parameter in model.named_parameters():
        sees_tokens = model.config.sequence_parallel and getattr(
            parameter, "sequence_parallel", False
        )
        if sees_tokens or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(parameter.grad)


def joined(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class Between(torch.autograd.Function):
    """One function forward, another one backward: `mine` and `joined` are each other's."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


class Decoder(torch.nn.Module):
    """The decoder of a model between an embedding and a projection that each rank has whole."""

    def __init__(self, model, device, seed):
        super().__init__()
        self.decoder, self.config = model.module.decoder, model.config
        width, like = self.config.hidden_size, {"device": device, "dtype": torch.bfloat16}
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(gpt.VOCABULARY, width, **like)
        self.projection = torch.nn.Linear(width, gpt.VOCABULARY, **like)

    def forward(self, tokens, positions, mask, labels):
        x = self.embedding(tokens.T)  # [s, b, hidden]
        spread = self.config.sequence_parallel
        x = self.decoder(Between.apply(x, mine, joined) if spread else x, mask)
        logits = self.projection(Between.apply(x, joined, mine) if spread else x).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.T.flatten())


# ---- training ------------------------------------------------------------------------------------


def trained(device, folders, seed, kind, options):
    """Train one rank's model, and the ranks' together, which begins with the same weights.

    `kind`: "model", "decoder", or "megatron" for the DDP and the optimizer of megatron-core.

    Returns of both losses and GEMMs in FP8 and others; and of the gradients of the first step the
    largest error with its name.
    """
    use(folders)
    gated, found, state, exact = "gated_linear_unit" in options, [], None, None
    for ranks in (1, dist.get_world_size()):
        parallel = begin(device, ranks, seed)
        if kind == "model" and device == "cpu":
            parallel["sequence_parallel"] = False
        if kind == "megatron":
            from megatron_cases import megatron_training

            def same(model):
                nonlocal state
                if state is None:
                    state = {n: p.detach().clone() for n, p in model.named_parameters()}
                load(model, state, gated)

            facts = megatron_training(device, False, before=same, **options, **parallel)
            found.append((facts["losses"], facts["fp8"], facts["other"]))
            continue
        model = gpt.make_model(device, **options, **parallel)
        model = model if kind == "model" else Decoder(model, device, seed)
        named = dict(model.named_parameters())
        if state is None:
            state = {name: p.detach().clone() for name, p in named.items()}
        load(model, state, gated)
        first = {}

        def after_backward(model, first=first, named=named, ranks=ranks):
            if ranks > 1:
                sum_gradients(model)
            if not first:
                first |= {name: p.grad.double() for name, p in named.items()}

        te.reset_counters()
        losses = gpt.train(model, device, after_backward=after_backward)
        found.append((losses, *gpt.gemms()))
        if exact is None:
            exact = first
    if kind == "megatron":
        return found, None
    parts = {name: part_of(name, p, exact[name], gated) for name, p in named.items()}
    return found, gpt.worst(first, parts)
