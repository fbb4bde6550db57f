# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_soak.py run: many steps of a small GPT, by one rank, then by all."""

import gc

import torch
import torch.distributed as dist
from pytorch.distributed_programs import to_cpu
from pytorch.helpers import states_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

WORDS, LENGTH, BATCH, WIDTH, LAYERS = 64, 64, 8, 128, 2
TOKENS = LENGTH * BATCH
GUESSED = 0.25  # of the tokens that are no function of the one before


class Model(torch.nn.Module):
    """Layers between an embedding and a projection, which each rank has whole for its rows."""

    def __init__(self, device, group, ranks):
        super().__init__()
        like = {"device": device, "dtype": torch.bfloat16}
        parallel = {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": ranks}
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, **like)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                WIDTH, 2 * WIDTH, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device,
                params_dtype=torch.bfloat16, tp_group=group, **parallel,
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        self.projection = torch.nn.Linear(WIDTH, WORDS, **like)
        self.group, self.ranks = group, ranks
        self.recipe = DelayedScaling(amax_history_len=16, reduce_amax=ranks > 1)

    def forward(self, line):
        """Loss of a rank's rows, as a part of that of all tokens; `line` [LENGTH + 1, BATCH]."""
        rank = dist.get_rank() if self.ranks > 1 else 0
        tokens, labels = (t.chunk(self.ranks)[rank] for t in (line[:-1], line[1:]))
        x = self.embedding(tokens)
        with te.autocast(recipe=self.recipe, amax_reduction_group=self.group):
            for layer in self.layers:
                x = layer(x, self_attn_mask_type="causal")
        logits = self.projection(x).float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / TOKENS

    def whole(self):
        """Parameters that ranks have whole, by name: their gradients are of the rank's rows."""
        named = self.named_parameters()
        return {n: p for n, p in named if not getattr(p, "tensor_model_parallel", False)}


def line_of(seed, step):
    """Tokens [LENGTH + 1, BATCH], each the one before plus 3, or any."""
    numbers = torch.Generator().manual_seed(seed + step)
    shape = LENGTH + 1, BATCH
    steps = torch.full(shape, 3)
    steps[0] = torch.randint(WORDS, (BATCH,), generator=numbers)
    guessed = torch.rand(shape, generator=numbers) < GUESSED
    steps[guessed] = torch.randint(WORDS, shape, generator=numbers)[guessed]
    return steps.cumsum(0) % WORDS


def alive(device):
    """Bytes of the tensors that are there."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def take_part(model, state, ranks, rank):
    """Give a rank's model its part of the whole parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = state[name]
            if parameter.shape != whole.shape:
                whole = whole.chunk(ranks, parameter.partition_dim)[rank]
            parameter.copy_(whole)


def train(model, device, seed, steps, looks):
    """Losses of all steps, and the bytes that are there after some of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, bytes_ = torch.zeros(steps, device=device), []
    for step in range(steps):
        loss = model(line_of(seed, step).to(device))
        loss.backward()
        losses[step] = loss.detach()
        if model.ranks > 1:
            for parameter in model.whole().values():
                dist.all_reduce(parameter.grad, group=model.group)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if step + 1 in looks:
            bytes_.append(alive(device))
    if model.ranks > 1:
        dist.all_reduce(losses, group=model.group)
    return losses.cpu(), bytes_


def soak(device, seed, steps, looks):
    """Train the model of one rank, and that of all with the same weights.

    Returns of each the losses and the bytes that were there; of the second the parameters that
    ranks have whole, and the scaling state.
    """
    torch.manual_seed(seed)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = Model(device, None, 1)
    state = {name: p.detach().clone() for name, p in alone.named_parameters()}
    found = [train(alone, device, seed, steps, looks)]
    del alone
    te.reset()
    together = Model(device, dist.group.WORLD, ranks)
    take_part(together, state, ranks, rank)
    found.append(train(together, device, seed, steps, looks))
    return found, to_cpu(list(together.whole().values())), to_cpu(states_of(together))
