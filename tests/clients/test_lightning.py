# SPDX-License-Identifier: Apache-2.0
"""lightning: Fabric and Trainer with FP8 precision, and resuming with weights and scales."""

import copy

import pytest
import torch
from clients.released import client
from pytorch.helpers import assert_same_bits, counted, data_generator
from torch import nn

import transformer_engine.pytorch as te

lightning = client("lightning")

from lightning.fabric.plugins import TransformerEnginePrecision as ForFabric  # noqa: E402
from lightning.pytorch.plugins import TransformerEnginePrecision as ForTrainer  # noqa: E402

RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}
WIDTH = 32
EVEN = 2  # linear layers whose sizes lightning converts; `odd` has another


# how precision is asked for: (arguments, dtype of weights, linear layers that become ours)
ASKED = {
    "bf16": ({"precision": "transformer-engine"}, torch.bfloat16, EVEN),
    "fp16": ({"precision": "transformer-engine-float16"}, torch.float16, EVEN),
    "plugin": ({}, torch.bfloat16, EVEN),
    "made-by-plugin": ({"replace_layers": True}, torch.bfloat16, EVEN + 1),
}


def options(how, plugin):
    """Arguments of Fabric or of a Trainer; `plugin` is the class of the plugin."""
    given, dtype, _ = ASKED[how]
    if "precision" in given:
        return given
    return {"plugins": plugin(weights_dtype=dtype, recipe=RECIPE, **given)}


asked = pytest.mark.parametrize("how", ASKED)


class Net(nn.Module):
    """Linear layers with and without bias, a norm, and sizes that lightning leaves alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, WIDTH, bias=False)
        self.odd = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.odd(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


def data():
    generator = data_generator()
    return torch.randn(64, WIDTH, generator=generator), torch.randn(64, 5, generator=generator)


def check_layers(net, dtype, converted):
    assert sum(type(m) is te.Linear for m in net.modules()) == converted
    assert type(net.norm) is te.LayerNorm
    assert {p.dtype for p in net.parameters()} == {dtype}


# ---- Fabric --------------------------------------------------------------------------------------


class Run:
    """A network and its optimizer under Fabric."""

    def __init__(self, device, how):
        self.fabric = lightning.Fabric(
            accelerator=ACCELERATORS[device], devices=1, **options(how, ForFabric)
        )
        self.fabric.launch()
        with self.fabric.init_module():
            net = Net()
        self.net = self.fabric.setup_module(net)  # which replaces parameters
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3, eps=1e-4)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def train(self, steps):
        """Losses of so many steps."""
        x, y = (t.to(self.fabric.device) for t in data())
        losses = []
        for _ in range(steps):
            out = self.net(x)
            assert out.dtype is torch.float32
            loss = (out - y).square().mean()
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@asked
def test_fabric_trains_in_fp8(device, how):
    run = Run(device, how)
    _, dtype, converted = ASKED[how]
    check_layers(run.net.module, dtype, converted)
    with counted() as gemms:
        losses = run.train(20)
    assert gemms.fp8 == 20 * (3 * converted - 1) and gemms.other == 0
    assert losses[-1] < losses[0]
    run.net.eval()
    with counted() as gemms, torch.no_grad():  # lightning enters the region here too
        run.net(data()[0].to(run.fabric.device))
    assert gemms.fp8 == converted and gemms.other == 0


@asked
def test_fabric_resumes(device, how, tmp_path):
    run = Run(device, how)
    run.train(4)
    run.fabric.save(tmp_path / "state.ckpt", {"net": run.net, "optimizer": run.optimizer, "at": 4})
    expected, content = run.train(4), copy.deepcopy(dict(run.net.state_dict()))
    te.reset()  # as in a new process
    resumed = Run(device, how)
    state = {"net": resumed.net, "optimizer": resumed.optimizer, "at": 0}
    resumed.fabric.load(tmp_path / "state.ckpt", state)
    assert state["at"] == 4 and resumed.train(4) == expected
    assert_same_bits(dict(resumed.net.state_dict()), content)


# ---- Trainer -------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """The network with its loss. `converted`: its layers are ours before lightning sees them."""

    def __init__(self, how, converted=False):
        super().__init__()
        torch.manual_seed(torch.initial_seed())  # alike each time in a test
        self.net = None
        if how != "made-by-plugin":
            self.net = te.convert(Net()) if converted else Net()
        self.losses = []
        self.validated = 0

    def configure_model(self):
        """Make what the plugin is to choose the classes for."""
        if self.net is None:
            self.net = Net()

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        with counted() as gemms:
            self.net(batch[0])
        assert gemms.fp8 > 0 and gemms.other == 0
        self.validated += 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=32)


def trainer(device, how, folder, epochs):
    return lightning.Trainer(
        accelerator=ACCELERATORS[device],
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options(how, ForTrainer),
    )


@asked
def test_the_trainer_trains_and_validates_in_fp8(device, how, tmp_path):
    module = Module(how)
    trainer(device, how, tmp_path, 10).fit(module, loader(), loader())
    check_layers(module.net, *ASKED[how][1:])
    assert len(module.losses) == 20
    assert sum(module.losses[-2:]) < sum(module.losses[:2])  # of two batches
    assert module.validated > 0


def halves(device, how, folder, make):
    """Losses of a run of four epochs, of one that is resumed after two, and what they end with."""
    whole = make()
    trainer(device, how, folder, 4).fit(whole, loader())
    content = copy.deepcopy(dict(whole.state_dict()))
    te.reset()
    first, half = make(), trainer(device, how, folder, 2)
    half.fit(first, loader())
    half.save_checkpoint(folder / "half.ckpt")
    te.reset()  # as in a new process
    second = make()
    rest = trainer(device, how, folder, 4)
    rest.fit(second, loader(), ckpt_path=folder / "half.ckpt", weights_only=False)
    return whole.losses, first.losses + second.losses, content, dict(second.state_dict())


@asked
def test_the_trainer_resumes(device, how, tmp_path):
    found = halves(device, how, tmp_path, lambda: Module(how, converted=True))
    expected, resumed, content, final = found
    assert resumed == expected
    assert_same_bits(final, content)


class Dropping(Module):
    """Leave the scales of a checkpoint out: the layers are those of torch when it is loaded."""

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = te.without_scaling_state(checkpoint["state_dict"])


def test_layers_that_lightning_converts_resume_without_scales(device, tmp_path):
    """The Trainer loads a checkpoint before it converts layers."""
    with pytest.raises(RuntimeError, match="Unexpected key.*_extra_state"):
        halves(device, "bf16", tmp_path, lambda: Module("bf16"))
    te.reset()
    expected, resumed, *_ = halves(device, "bf16", tmp_path, lambda: Dropping("bf16"))
    assert resumed[:4] == expected[:4] and resumed[-1] < expected[3]
