# SPDX-License-Identifier: Apache-2.0
"""Random programs of a layer: as one call where it can, and by its modules, bit for bit.

Regions, recipes, modes, checkpoints, masks, sizes, frozen parameters, hooks, wrapped and replaced
modules follow one another in whatever order; backwards come late, or after another forward.
"""

import contextlib
import random

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from pytorch.layer_ways import BATCH, HIDDEN, LAYER, by_branches, by_modules, make_layer, watched
from pytorch.random_programs import CALLS, MODES, REGIONS, steps_of
from thinning import every_other
from tols import BF16

import transformer_engine.pytorch as te

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

LAYERS = {
    "encoder": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "fused": {"fuse_qkv_params": True, "attn_input_format": "bshd"},
    "decoder": {"layer_type": "decoder", "hidden_dropout": 0.2},
    "parallel": {"parallel_attention_mlp": True, "drop_path_rate": 0.3},
    "main_grad": {"fuse_qkv_params": True, "fuse_wgrad_accumulation": True, "hidden_dropout": 0.1},
}


class Wrapper(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *given):
        return self.base(*given)


def programs(seed):
    """Steps of a random program, and what happens to the layer before each."""

    def draw(rng):
        return {
            "mode": rng.choice(["plain", "plain", "plain", "no_grad", "inference"]),
            "region": rng.choice(["none", *["delayed"] * 3, "current", "calibrating"]),
            "call": rng.choice(["direct", "direct", "direct", "own", "torch, hooked"]),
            "cast": rng.random() < 0.1,
            "wants": rng.random() < 0.7,
            "times": rng.choice([1, 1, 2]),
            "backward": rng.choice(["now", "now", "later", "never"]),
            "length": rng.choice([5, 5, 1, 8]),
            "mask": rng.choice([None, None, "no_mask", "causal_bottom_right"]),
            "first": rng.choice([None] * 4 + [True, True, False, False]),
        }

    for rng, step in steps_of(seed, draw, 0.5):
        yield {**step, "change": rng.choice([None] * 12 + list(CHANGES)), "seed": rng.random()}


def freeze(layer, rng, wanted=False):
    for parameter in rng.sample(list(layer.parameters()), 4):
        parameter.requires_grad_(wanted)


def replace(layer, rng):
    proj = layer.self_attention.proj
    proj = getattr(proj, "base", proj)
    name, parameter = rng.choice(list(proj.named_parameters()))
    setattr(proj, name, torch.nn.Parameter(parameter.detach() * 0.5))


def hook(layer, _):
    layer.handle = layer.layernorm_mlp.register_forward_hook(lambda *_: None)


def unhook(layer, _):
    if hasattr(layer, "handle"):
        layer.handle.remove()


def wrap(layer, _):
    if not isinstance(layer.self_attention.proj, Wrapper):
        layer.self_attention.proj = Wrapper(layer.self_attention.proj)


def unwrap(layer, _):
    layer.self_attention.proj = getattr(
        layer.self_attention.proj, "base", layer.self_attention.proj
    )


def drop(layer, rng):
    layer.hidden_dropout = rng.choice([0.0, 0.1, 0.4])


def load(layer, _):
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})


def scale(layer, _):
    with torch.no_grad():
        layer.layernorm_mlp.fc1_weight.mul_(1.5)


CHANGES = {
    "freeze": freeze,
    "thaw": lambda layer, rng: freeze(layer, rng, True),
    "replace": replace,
    "reset": lambda layer, _: layer.reset_fp8_meta_tensors(),
    "eval": lambda layer, _: layer.eval(),
    "train": lambda layer, _: layer.train(),
    "eval a part": lambda layer, _: layer.self_attention.core_attention.eval(),
    "hook": hook,
    "unhook": unhook,
    "wrap": wrap,
    "unwrap": unwrap,
    "drop": drop,
    "load": load,
    "forget": lambda *_: te.reset(),
    "scale": scale,
}
"""What a program does to a layer between two calls."""


def run_step(layer, step, waiting):
    """Tensors that a step gives, or the error that it raises."""
    device, first = next(layer.parameters()).device, layer.attn_input_format == "sbhd"
    sizes = (step["length"], BATCH) if first else (BATCH, step["length"])
    inputs = [
        torch.randn(*sizes, HIDDEN).to(device, BF16).requires_grad_(step["wants"])
        for _ in range(step["times"])
    ]
    others = {"self_attn_mask_type": step["mask"], "is_first_microbatch": step["first"]}
    if layer.layer_type == "decoder":
        others["encoder_output"] = torch.randn(*sizes, HIDDEN).to(device, BF16)
    outs = []
    try:
        with MODES[step["mode"]](), torch.autocast(device.type, BF16, enabled=step["cast"]):
            with REGIONS[step["region"]]():
                for x in inputs:
                    outs.append(CALLS[step["call"]](lambda x: layer(x, **others), x))
        wanted = [out.float().square().sum() for out in outs if out.requires_grad]
        if step["backward"] == "later":
            waiting += wanted
        elif step["backward"] == "now" and wanted:
            sum([*wanted, *waiting]).backward()
            waiting.clear()
    except (RuntimeError, ValueError, TypeError) as error:
        waiting.clear()
        return f"{type(error).__name__}: {error}"
    return [*(out.detach() for out in outs), *(x.grad for x in inputs)]


def main_grads_of(layer):
    """What the weights' gradients are added to; a weight that has come anew gets zeros."""
    weights = [p for name, p in layer.named_parameters() if name.endswith("weight") and p.dim() > 1]
    for weight in weights:
        if not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return [weight.main_grad for weight in weights]


def run_program(kind, seed, device):
    """Results of every step, with the gradients and the state after it."""
    torch.manual_seed(seed)
    layer, results, waiting = make_layer(device, BF16, **LAYERS[kind]), [], []
    moved = False  # the layer has changed since a forward whose backward is to come
    for step in programs(seed):
        moved = bool(waiting) and (moved or step["change"] is not None)
        step["moved"] = moved
        if step["change"] is not None:
            CHANGES[step["change"]](layer, random.Random(step["seed"]))
        for parameter in layer.parameters():
            parameter.grad = None
        main = main_grads_of(layer)
        result = run_step(layer, step, waiting)
        grads = [parameter.grad for parameter in layer.parameters()]
        grads += [grad.clone() for grad in main]
        results.append((step, result, grads, states_of(layer)))
    return results


# Programs are others in each run.
@every_other(kind=LAYERS, number=range(8))
def test_random_programs(kind, number, device, rng):
    del number
    seed = int(rng.integers(2**31))
    runs = []
    for way in (contextlib.nullcontext, by_branches, by_modules):
        te.reset()
        with way():
            runs.append(run_program(kind, seed, device))
    *ours, theirs = runs
    for run in ours:
        for found, expected in zip(run, theirs, strict=True):
            step, result, *rest = found
            texts = [text for text in (result, expected[1]) if isinstance(text, str)]
            if step["moved"] and any("CheckpointError" in text for text in texts):
                break  # torch compares what is saved, which of a layer are not those of modules
            assert isinstance(result, str) == isinstance(expected[1], str), (step, result)
            if isinstance(result, str):
                if "inplace operation" in result:  # torch names the first one that is read
                    assert "inplace operation" in expected[1], step
                    break  # raised in a backward, which modules have done a part of by then
                assert result == expected[1], step
            else:
                assert_same_bits(result, expected[1], str(step))
            assert_same_bits(rest, list(expected[2:]), str(step))


def test_the_programs_run_as_one_call(device):
    with watched() as found:
        for seed in range(8):
            run_program("encoder", seed, device)
    taken = [whole for name, whole in found if name == LAYER]
    assert taken.count(True) > 40 and taken.count(False) > 20
