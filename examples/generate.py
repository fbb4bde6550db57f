# SPDX-License-Identifier: Apache-2.0
"""Let a model of train_gpt.py write, with caches of keys and values and without, and compare.

    python examples/train_gpt.py                       # trains, and leaves build/demo/model_fp8.pt
    python examples/generate.py                        # writes after "def "
    python examples/generate.py --prompt "class A" --prompt "import "    # several at a time
    python examples/generate.py --ways paged captured --tokens 500

Four ways: "whole" runs all bytes again for each new one; "contiguous" and "paged" keep keys and
values in a cache; "captured" (on a GPU) is "contiguous" with the step as a CUDA graph. All draw
with the same random numbers, so they write the same, unless two bytes are nearly equally likely.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import checkpoints
import torch
from gpt import GPT, RECIPES, VOCABULARY, Config

import transformer_engine.pytorch as te

WAYS = ("whole", "contiguous", "paged", "captured")
PAGE = 16
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


class Written(NamedTuple):
    """Tokens that one way wrote, and its times."""

    tokens: torch.Tensor  # [count, prompts], on the CPU
    logits: torch.Tensor  # [count, prompts, VOCABULARY] fp32: what each was drawn from
    seconds: float  # for all but the first
    text: list[str]  # prompts and what follows


class Generator:
    """A trained model, prompts, and the random numbers to draw with.

    Parameters
    ----------
    model : GPT
        On the device and in the dtype that it runs in.
    prompts : list of bytes
        None is empty.
    count : int
        Bytes to write after each.
    temperature : float
        0: always the likeliest byte.
    seed : int
        Of the random numbers.
    recipe : Recipe, optional
        Linear layers run in FP8.
    """

    def __init__(
        self,
        model: GPT,
        prompts: list[bytes],
        count: int,
        temperature: float = 0.8,
        seed: int = 0,
        recipe: te.recipe.Recipe | None = None,
    ) -> None:
        self.model, self.prompts, self.count, self.recipe = model.eval(), prompts, count, recipe
        self.device = model.embedding.weight.device
        self.lengths = [len(prompt) for prompt in prompts]
        self.total = max(self.lengths) + count
        window = torch.zeros(max(self.lengths), len(prompts), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            window[: len(prompt), i] = torch.tensor(list(prompt))
        self.window = window.to(self.device)
        self.last = torch.tensor(self.lengths, device=self.device) - 1
        # The likeliest of logits / temperature + Gumbel noise is a draw from their softmax.
        draw = torch.Generator().manual_seed(seed)
        uniform = torch.rand(count, len(prompts), VOCABULARY, generator=draw)
        noise = -(-uniform.clamp_min(1e-20).log()).log() * temperature
        self.noise = noise.to(self.device)
        # Where results go: a captured step writes them by a number on the device.
        self.step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.token = torch.zeros(1, len(prompts), dtype=torch.long, device=self.device)
        self.tokens = torch.zeros(count, len(prompts), dtype=torch.long, device=self.device)
        self.logits = torch.zeros(count, len(prompts), VOCABULARY, device=self.device)

    # -- a step ---------------------------------------------------------------------------------

    def features(self, window: torch.Tensor, cache: te.InferenceParams | None) -> torch.Tensor:
        """Run the model but for its head."""
        with self.precision():
            return self.model(window, cache)

    def precision(self) -> contextlib.AbstractContextManager:
        return te.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def choose(self, features: torch.Tensor) -> None:
        """Draw a byte for each prompt from the features [prompts, hidden] of its last one."""
        with self.precision():
            logits = self.model.head(features[None])[0].float()
        best = (logits + self.noise.index_select(0, self.step)[0]).argmax(-1)
        self.logits.index_copy_(0, self.step, logits[None])
        self.tokens.index_copy_(0, self.step, best[None])
        self.token.copy_(best[None])
        self.step.add_(1)

    def make_cache(self, paged: bool) -> te.InferenceParams:
        layer = self.model.layers[0].self_attention.core_attention
        room = -(-self.total // PAGE) * PAGE
        return te.InferenceParams(
            max_batch_size=len(self.prompts),
            max_sequence_length=room,
            num_heads_kv=layer.num_gqa_groups,
            head_dim_k=layer.hidden_size_per_attention_head_k,
            dtype=self.model.norm.weight.dtype,
            is_paged=paged,
            page_size=PAGE if paged else None,
            device=self.device,
        )

    # -- ways -----------------------------------------------------------------------------------

    def begin(self, cache: te.InferenceParams | None) -> None:
        """Read the prompts, and draw the first byte after each."""
        self.step.zero_()
        if cache is not None:
            cache.reset()
            cache.pre_step(OrderedDict(enumerate(self.lengths)))
        rows = torch.arange(len(self.prompts), device=self.device)
        self.choose(self.features(self.window, cache)[self.last, rows])

    def whole(self) -> Callable[[], None]:
        """All bytes again, for each new one."""
        rows = torch.arange(len(self.prompts), device=self.device)
        window = torch.cat((self.window, self.window.new_zeros(self.count, len(rows))))
        self.begin(None)
        longest = len(self.window)

        def step() -> None:
            nonlocal longest
            done = longest - len(self.window) + 1
            window[self.last + done, rows] = self.token[0]
            longest += 1
            self.choose(self.features(window[:longest], None)[self.last + done, rows])

        return step

    def cached(self, cache: te.InferenceParams) -> Callable[[], None]:
        """Only the new bytes; keys and values of the others are kept."""
        self.begin(cache)
        one_each = OrderedDict((i, 1) for i in range(len(self.prompts)))

        def step() -> None:
            cache.pre_step(one_each)
            self.choose(self.features(self.token, cache)[0])

        return step

    def captured(self, cache: te.InferenceParams) -> Callable[[], None]:
        """The step of `cached` as a CUDA graph, which reads nothing of the host."""
        step = self.cached(cache)
        step()  # a step that is captured finds everything compiled and allocated
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        self.begin(cache)
        return graph.replay

    @torch.no_grad()
    def run(self, way: str) -> Written:
        """Write in one of `WAYS`."""
        cache = None if way == "whole" else self.make_cache(way == "paged")
        if way == "captured":
            step = self.captured(cache)
        else:
            step = self.whole() if cache is None else self.cached(cache)
        self.wait()
        began = time.perf_counter()
        for _ in range(self.count - 1):
            step()
        self.wait()
        seconds = time.perf_counter() - began
        tokens, logits = self.tokens.cpu().clone(), self.logits.cpu().clone()
        written = [
            (prompt + bytes(tokens[:, i].tolist())).decode("utf-8", "replace")
            for i, prompt in enumerate(self.prompts)
        ]
        return Written(tokens, logits, seconds, written)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def differ(self, one: Written, other: Written) -> tuple[int, float, float]:
        """Compare two ways up to the first step where they wrote differently.

        Returns
        -------
        (int, float, float)
            Steps that are equal; largest difference of logits up to the first that is not; and how
            far apart the two bytes were there, to `one` (0 where all steps are equal).
        """
        same = (one.tokens == other.tokens).all(1)
        equal = int(same.long().cumprod(0).sum())
        seen = slice(0, min(equal + 1, self.count))
        largest = float((one.logits[seen] - other.logits[seen]).abs().max())
        if equal == self.count:
            return equal, largest, 0.0
        score = one.logits[equal] + self.noise[equal].cpu()
        chosen = [w.tokens[equal, :, None] for w in (one, other)]
        apart = (score.gather(1, chosen[0]) - score.gather(1, chosen[1])).abs().max()
        return equal, largest, float(apart)


def load_model(path: Path, device: torch.device, dtype: torch.dtype, length: int) -> GPT:
    """Read a model that train_gpt.py wrote, for sequences of up to so many bytes."""
    saved = checkpoints.load(path, device)
    if "config" not in saved:
        raise SystemExit(f"{path}: no model of train_gpt.py (one of its checkpoints?)")
    config = Config(**{**saved["config"], "dropout": 0.0})
    model = GPT(config, device)
    model.load_state_dict(saved["model"])
    model = model.to(dtype)
    rotary = te.RotaryPositionEmbedding(config.hidden // config.heads)
    model.angles = rotary(-(-max(length, config.seq) // PAGE) * PAGE).to(device)  # fp32, and longer
    return model


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="default: the demo's, of build/demo")
    add("--prompt", action="append", help='may come several times (default: "def ")')
    add("--tokens", type=int, metavar="N", help="bytes to write (default: what the window holds)")
    add("--temperature", type=float, default=0.8)
    add("--seed", type=int, default=0)
    add("--ways", nargs="+", choices=WAYS, help="default: all that the device has")
    add("--fp8", choices=sorted(RECIPES), help="run linear layers in FP8, by this scaling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device)
    args.prompts = [prompt.encode() for prompt in args.prompt or ["def "]]
    if not all(args.prompts):
        parser.error("--prompt: an empty prompt")
    if args.ways is None:
        args.ways = [way for way in WAYS if way != "captured" or args.device.type == "cuda"]
    if args.model is None:
        found = sorted(Path("build/demo").glob("model_*.pt"))
        if not found:
            parser.error("--model: there is none in build/demo: run examples/train_gpt.py first")
        args.model = found[-1]  # fp8, where there is one
    return args


def main(arguments: list[str] | None = None) -> int:
    """Write in all ways, show the text and a table; return the exit status."""
    args = parse(arguments)
    longest = max(map(len, args.prompts))
    dtype = DTYPES[args.device.type]
    model = load_model(args.model, args.device, dtype, longest + (args.tokens or 0))
    count = args.tokens or max(2, len(model.angles) - longest)
    recipe = None if args.fp8 is None else RECIPES[args.fp8]()
    settings = args.prompts, count, args.temperature, args.seed, recipe
    generator = Generator(model, *settings)
    results = {way: generator.run(way) for way in args.ways}
    first = results[args.ways[0]]
    for text in first.text:
        print(f"{text}\n" + "-" * 70)
    print(f"{'':12s}{'tokens/s':>10s}{'ms/token':>10s}   beside {args.ways[0]}")
    failed = False
    for way, written in results.items():
        equal, largest, apart = generator.differ(first, written)
        steps = max(1, count - 1)
        rate = steps * len(args.prompts) / written.seconds
        said = f"{equal} of {count} equal, logits differ by {largest:.1e}"
        if equal < count:
            said += f", at the first difference both are {apart:.1e} apart"
            failed |= apart > 2 * largest
        print(f"{way:12s}{rate:10,.0f}{1e3 * written.seconds / steps:10.2f}   {said}")
    if failed:
        print("FAILED: another byte was written than nearly equal logits explain", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
