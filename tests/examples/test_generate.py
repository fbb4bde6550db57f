# SPDX-License-Identifier: Apache-2.0
"""The generation example: caches change nothing of what a trained model writes."""

from pathlib import Path

import processes
import pytest
import torch
from comparators import assert_nmse
from tols import BF16, F32, tol

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HIDDEN, SEQ, COUNT = 64, 32, 40
PROMPTS = [b"def ", b"import torch", b"x"]
SIZES = {"layers": 2, "hidden": HIDDEN, "heads": 4, "seq": SEQ, "batch": 4, "steps": 8,
         "valid-windows": 4, "sample": 2}  # fmt: skip


@pytest.fixture(scope="module")
def model_file(device, example, tmp_path_factory):
    """A model that train_gpt.py has left."""
    out = tmp_path_factory.mktemp("demo")
    text = out / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400, encoding="utf-8")
    words = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    words += ["--text", str(text), "--out", str(out), "--device", device, "--no-check"]
    assert example("train_gpt").main([*words, "--precision", "fp8"]) == 0
    return out / "model_fp8.pt"


@pytest.fixture
def generator(device, example, model_file):
    """Function that makes one."""
    generate = example("generate")

    def make(dtype=None, **options):
        where = torch.device(device)
        dtype = generate.DTYPES[device] if dtype is None else dtype
        model = generate.load_model(model_file, where, dtype, COUNT + 12)
        return generate.Generator(model, PROMPTS, COUNT, **options)

    return make


def ways(device):
    return ["contiguous", "paged", *(["captured"] if device == "cuda" else [])]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_caches_change_nothing(device, generator, temperature):
    """Tokens are equal, or nearly equally likely where they first differ; logits are close."""
    made = generator(temperature=temperature)
    dtype = F32 if device == "cpu" else BF16
    whole, results = made.run("whole"), {}
    assert len(set(whole.text)) == 3 and all(len(t.encode()) > 40 for t in whole.text)
    for way in ways(device):
        written = results[way] = made.run(way)
        equal, largest, apart = made.differ(whole, written)
        seen = slice(0, min(equal + 1, COUNT))
        bound = 2 * tol("layer", dtype, 4 * HIDDEN)
        assert_nmse(written.logits[seen], whole.logits[seen].double(), bound)
        assert apart <= 2 * largest
        if device == "cpu":
            assert equal == COUNT and written.text == whole.text
    if device == "cuda":
        assert torch.equal(results["contiguous"].logits, results["captured"].logits)


def test_prompts_by_themselves_are_written_on_alike(device, generator):
    """Beside longer ones, and beyond the window that the model was trained with."""
    made = generator(F32 if device == "cpu" else BF16, temperature=0.0)
    together = made.run("contiguous")
    for i, prompt in enumerate(PROMPTS):
        made_alone = type(made)(made.model, [prompt], COUNT, temperature=0.0)
        alone = made_alone.run("contiguous")
        bound = 2 * tol("layer", F32 if device == "cpu" else BF16, 4 * HIDDEN)
        assert_nmse(alone.logits[0, 0], together.logits[0, i].double(), bound)


def run(model_file, device, *words, folder=None):
    words = ["--device", device, *words]
    if model_file is not None:
        words += ["--model", str(model_file)]
    return processes.run(
        EXAMPLES / "generate.py",
        *words,
        folder=folder,
        limit=300,
        check=False,
        fresh=device != "cpu",
        OMP_NUM_THREADS="1",
    )


def test_the_table(device, model_file):
    done = run(model_file, device, "--prompt", "def ", "--tokens", "6", "--fp8", "delayed")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert done.stdout.startswith("def ")
    rows = [line.split() for line in lines if "of 6 equal" in line]
    assert [row[0] for row in rows] == ["whole", *ways(device)]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)


def test_mistakes(device, model_file, tmp_path):
    done = run(None, device, folder=tmp_path)
    assert done.returncode == 2 and "run examples/train_gpt.py first" in done.stderr
    done = run(model_file, device, "--prompt", "")
    assert done.returncode == 2 and "an empty prompt" in done.stderr
