# SPDX-License-Identifier: Apache-2.0
"""accelerate: FP8 training from `prepare` to loading, its own tests, and Hugging Face's Trainer."""

import itertools
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
from clients.released import client
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits, counted, states_of
from tols import tol
from torch import nn

import transformer_engine.pytorch as te

client("accelerate")

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    FP8RecipeKwargs,
    TERecipeKwargs,
    has_transformer_engine_layers,
    is_transformer_engine_mxfp8_available,
)
from accelerate.utils.modeling import load_checkpoint_in_model  # noqa: E402

SETTINGS = {"amax_history_len": 16, "amax_compute_algo": "max", "fp8_format": "HYBRID"}
WIDTH = 32


@pytest.fixture(autouse=True)
def fresh_state():
    """Each Accelerator keeps the first Accelerator's settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def te_handler(**settings):
    return TERecipeKwargs(**SETTINGS, **settings)


def former_handler(**settings):
    with pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"):
        return FP8RecipeKwargs(backend="TE", **SETTINGS, **settings)


def torch_model():
    """Layers of torch, for accelerate to convert."""
    return nn.Sequential(
        nn.Linear(WIDTH, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Sequential(nn.Linear(64, WIDTH, False)),
    )


class Layers(nn.Module):
    """Layers of ours, with weights that lie in one allocation."""

    def __init__(self):
        super().__init__()
        self.layer = te.TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
        self.head = te.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(1))).squeeze(1)


MODELS = {"converted": (torch_model, 2), "own": (Layers, 5)}  # with their linear layers
HANDLERS = {"TERecipeKwargs": te_handler, "FP8RecipeKwargs": former_handler}


class Run:
    """A prepared model, its optimizer and two batches."""

    def __init__(self, device, model="converted", handler=te_handler, **settings):
        handlers = [handler(**settings)]
        self.accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=handlers, cpu=device == "cpu"
        )
        make, self.linears = MODELS[model]
        module = make()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH), torch.randn(64, WIDTH))
        loader = torch.utils.data.DataLoader(data, batch_size=32)
        prepared = self.accelerator.prepare(module, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, steps):
        """Losses of so many steps."""
        losses = []
        for x, y in itertools.islice(itertools.cycle(list(self.loader)), steps):
            loss = (self.model(x) - y).square().mean()
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_fp8_and_evaluation_is_not(device, model, handler):
    run = Run(device, model, handler)
    assert has_transformer_engine_layers(run.model)
    assert {p.device.type for p in run.model.parameters()} == {device}
    with counted() as gemms:
        losses = run.train(20)
    # a forward and two gradients of each linear layer, but none of the input of the first
    before_first = model == "own"  # its norm has parameters, so their gradients pass the linear
    assert gemms.fp8 == 20 * (3 * run.linears - (0 if before_first else 1)) and gemms.other == 0
    assert sum(losses[-2:]) < sum(losses[:2])  # two batches
    run.model.eval()
    with counted() as gemms, torch.no_grad():
        run.model(next(iter(run.loader))[0])
    assert gemms.fp8 == 0 and gemms.other == run.linears


def test_evaluation_in_fp8_by_its_switch(device):
    run = Run(device, use_autocast_during_eval=True)
    run.model.eval()
    with counted() as gemms, torch.no_grad():
        run.model(next(iter(run.loader))[0])
    assert gemms.fp8 == run.linears and gemms.other == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_saved_state_resumes(device, model, tmp_path):
    run = Run(device, model)
    run.train(4)
    run.accelerator.save_state(str(tmp_path))
    kept = {k: v.clone() for k, v in run.model.state_dict().items()}
    expected = run.train(4)
    assert not torch.equal(run.model.state_dict()[next(iter(kept))], kept[next(iter(kept))])
    run.accelerator.load_state(str(tmp_path))
    assert_same_bits(dict(run.model.state_dict()), kept)
    assert run.train(4) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_saved_model_loads_into_a_fresh_one(device, model, safe, tmp_path):
    run = Run(device, model)
    run.train(4)
    run.accelerator.save_model(run.model, str(tmp_path), safe_serialization=safe)
    make, _ = MODELS[model]
    with torch.device("cpu"):
        fresh = make()
    if model == "converted":
        with torch.no_grad():
            from accelerate.utils import convert_model

            convert_model(fresh)
    load_checkpoint_in_model(fresh, str(tmp_path))
    assert_same_bits(dict(fresh.state_dict()), dict(run.model.state_dict()))
    assert_same_bits(states_of(fresh), states_of(run.model))


def test_weights_without_scales_load_into_a_model_without_memory(device, tmp_path):
    """A device map lets accelerate set parameters and buffers only, so scales stay behind."""
    run = Run(device, "own")
    run.train(2)
    weights = {k: v for k, v in run.model.state_dict().items() if "_extra_state" not in k}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        fresh = Layers()
    fresh = load_checkpoint_and_dispatch(
        fresh, str(tmp_path), device_map={"": "cpu" if device == "cpu" else 0}
    )
    found = {k: v for k, v in fresh.state_dict().items() if "_extra_state" not in k}
    assert_same_bits(found, weights)
    with counted() as gemms, te.autocast():
        fresh(torch.randn(16, WIDTH, device=device))
    assert gemms.fp8 == 5


def test_an_unwrapped_model_is_a_plain_one(device):
    run = Run(device)
    run.train(1)
    x = torch.randn(16, WIDTH, device=device)
    run.model.eval()
    wrapped = run.accelerator.unwrap_model(run.model)
    assert_same_bits(wrapped(x), run.model(x))
    model = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    reference = torch_model().double()
    reference.load_state_dict(te.without_scaling_state(model.state_dict()))
    bound = 4 * tol("sum", torch.float32, 64)
    assert_nmse(model(x).cpu(), reference(x.cpu().double()), bound)
    restored = pickle.loads(pickle.dumps(model))
    assert_same_bits(restored(x), model(x))
    assert_same_bits(states_of(restored), states_of(model))


def test_recipes_that_are_not_built_are_refused_with_the_reason(device):
    assert not is_transformer_engine_mxfp8_available()
    with pytest.raises(ValueError, match="MXFP8 block scaling is not available: .*MXFP8"):
        handler = TERecipeKwargs(use_mxfp8_block_scaling=True)
        accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=[handler], cpu=device == "cpu"
        )
        model = torch_model()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


# ---- accelerate's own tests ----------------------------------------------------------------------

# What of them needs this package and neither a network nor several GPUs.
OWN_TESTS = {
    "imports": ("test_imports.py", "test_te_import", 1),
    "unwrap": ("test_accelerator.py", "test_can_unwrap_model_te", 1),
    "prepare": ("test_fp8.py", "TestTransformerEngine and single_gpu", 2),
}


@pytest.mark.parametrize(
    "name", ["imports", "unwrap", pytest.param("prepare", marks=pytest.mark.gpu)]
)
def test_its_own_tests_pass(name, fetched):
    file, selected, count = OWN_TESTS[name]
    if name == "unwrap":
        client("parameterized")
    folder = fetched("accelerate-1.15.0")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-q"]
    command += ["-p", "no:cacheprovider", f"tests/{file}", "-k", selected]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{count} passed", done.stdout) and "skipped" not in done.stdout


# ---- Hugging Face's Trainer ----------------------------------------------------------------------


class Dataset(torch.utils.data.Dataset):
    """Sequences that a language model can learn."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(32) * 3 + index) % 64
        return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("convert", [False, True], ids=["by-prepare", "beforehand"])
def test_the_trainer_of_transformers(device, tmp_path, monkeypatch, convert):
    transformers = client("transformers")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=6,
        report_to="none",
        use_cpu=device == "cpu",
        disable_tqdm=True,
    )

    def make():
        AcceleratorState._reset_state(reset_partial_state=True)
        te.reset()
        model = transformers.LlamaForCausalLM(config)
        if convert:
            te.convert(model)
        return transformers.Trainer(model=model, args=arguments, train_dataset=Dataset())

    def losses_of(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    trainer = make()
    with counted() as gemms:
        trainer.train()
    # q, k, v, o, gate, up, down and the head: three GEMMs each
    assert gemms.fp8 == 12 * 8 * 3 and gemms.other == 0
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    if convert:
        assert losses_of(resumed) == losses
    else:  # the checkpoint is loaded into a model of torch.nn, which takes no scales
        assert losses_of(resumed)[:6] == losses[:6] and losses_of(resumed)[-1] < losses[5]
