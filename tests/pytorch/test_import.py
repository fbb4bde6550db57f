# SPDX-License-Identifier: Apache-2.0
"""What `import transformer_engine.pytorch` does not do: processes, CUDA libraries, environment."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import transformer_engine
import transformer_engine.pytorch as te

ROOT = Path(transformer_engine.__file__).parents[1]

# Runs in a fresh interpreter and prints what it saw; `before` is what `import torch` had done.
WATCH = """
import json, os, re, sys
import torch, torch.utils.checkpoint

PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
           "os.exec", "pty.spawn"}
started, reads = [], []
sys.addaudithook(lambda event, args: started.append(event) if event in PROCESS else None)

class Spy(type(os.environ)):
    def __getitem__(self, name):
        frame = sys._getframe(1)
        while frame is not None:
            if "/transformer_engine/" in frame.f_code.co_filename:
                reads.append(name)
            frame = frame.f_back
        return super().__getitem__(name)

os.environ.__class__ = Spy

def libraries():
    names = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
    return sorted(n for n in names if re.search(r"libcu|libnv|cublas|cudnn|nvrtc|nccl", n))

def packages():
    return {name.partition(".")[0] for name in sys.modules}

def threads():
    return len(os.listdir("/proc/self/task"))

seen = {"libraries before": libraries(), "threads before": threads()}
modules, before = set(sys.modules), packages()
import transformer_engine.pytorch as te
seen["libraries"], seen["threads"] = libraries(), threads()
seen["packages"] = sorted(packages() - before)
seen["torch modules"] = sorted(n for n in set(sys.modules) - modules if n.startswith("torch"))
seen["processes"], seen["reads"] = list(started), list(reads)
seen["initialised"] = torch.cuda.is_initialized()
layer = te.Linear(16, 16, device="cpu")
with te.autocast():
    layer(torch.ones(16, 16)).sum().backward()
seen["libraries after a step on the CPU"] = libraries()
te.recipe.Float8CurrentScaling()
os.system("true")
seen["spies see"] = [bool(started), "TE_FP8_CURRENT_SCALING_POWER_2_SCALES" in reads]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run(
        [sys.executable, "-c", WATCH], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["spies see"] == [True, True]
    return facts


def test_starts_no_process_and_no_thread(seen):
    assert seen["processes"] == []
    assert seen["threads"] <= seen["threads before"]


def test_opens_no_cuda_library_that_torch_had_not(seen):
    assert seen["libraries"] == seen["libraries before"]
    assert seen["libraries after a step on the CPU"] == seen["libraries before"]
    assert seen["initialised"] is False


def test_reads_no_environment(seen):
    """But for the name of a module that is loaded at once, to replace ours."""
    assert set(seen["reads"]) <= {"TE_PLUGIN", "NVTE_PLUGIN"}


def test_needs_only_torch_and_little_of_it(seen):
    """The compiler of torch takes a second to import: only programs that compile pay for it."""
    added = set(seen["packages"]) - {"transformer_engine"}
    assert added <= set(sys.stdlib_module_names), added
    assert not [n for n in seen["torch modules"] if n.startswith("torch._dynamo")]


def test_public_names_and_version():
    assert transformer_engine.__version__ == "2.20.2"
    wanted = {"Linear", "autocast", "fp8_autocast", "checkpoint", "explain", "get_default_recipe",
              "get_device_compute_capability", "is_bf16_available", "is_fp8_available",
              "reset"}  # fmt: skip
    assert wanted <= set(te.__all__)
    assert all(hasattr(te, name) for name in te.__all__)


def test_names_live_under_the_public_package():
    """Clients compare `__module__`; tools that rewrite torch.nn.Linear leave ours alone."""
    assert te.Linear.__module__.startswith("transformer_engine.pytorch")
    assert issubclass(te.Linear, torch.nn.Module) and not issubclass(te.Linear, torch.nn.Linear)


LAZY = """
import sys
import transformer_engine
modules = [name for name in sys.modules if name.startswith("transformer_engine.")]
assert not modules and "torch" not in sys.modules, modules
assert {"common", "pytorch"} <= set(dir(transformer_engine))
assert "jax" not in sys.modules
assert hasattr(transformer_engine, "pytorch") and "torch" in sys.modules
import transformer_engine.pytorch
assert transformer_engine.pytorch.Linear is transformer_engine.pytorch.module.Linear
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import transformer_engine
assert not hasattr(transformer_engine, "pytorch")
try:
    transformer_engine.pytorch
except AttributeError as error:
    assert "needs PyTorch" in str(error) and "pip install" in str(error), error
assert transformer_engine.common.recipe.DelayedScaling()
"""


@pytest.mark.parametrize("code", [LAZY, WITHOUT_TORCH], ids=["with torch", "without torch"])
def test_subpackages_are_attributes(code):
    """Programs ask hasattr(transformer_engine, "pytorch"), having imported the package alone."""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


RARE = """
import sys
import transformer_engine.pytorch as te
rare = {"ops", "tensor", "optimizers", "cpp_extensions", "distributed", "quantization", "utils"}
path = "transformer_engine.pytorch."
light = {path + "tensor", path + "tensor.pickling"}  # `torch.load` knows what pickles name
loaded = [name for name in sys.modules if name.startswith(path) and name.split(".")[2] in rare]
loaded = [name for name in loaded if name not in light]
assert not loaded, loaded
assert te.fp8.FP8GlobalStateManager and "transformer_engine.pytorch.quantization" in sys.modules
"""


def test_paths_that_few_programs_use_are_not_loaded():
    run = [sys.executable, "-c", RARE]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _private_names(path):
    """Yield the names of torch that a file reads and that are not public."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (name for name in names if re.match(r"torch\..*\b_(?!foreach_|_)", name))


def test_names_of_torch_that_are_not_public_stand_in_one_file():
    """What a release of torch may rename is found in one place."""
    package = Path(te.__file__).parent
    found = {path.relative_to(package) for path in package.rglob("*.py") if [*_private_names(path)]}
    assert found == {Path("torchside/modes.py")}
