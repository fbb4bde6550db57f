# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README, of CONTRIBUTING and of docs is run, compiled or checked.

tests/markdown_pages.py says how a page speaks to these tests. A page that is added is picked up.

python    all of a page in one process and one namespace, in a folder that is thrown away
c         compiled with warnings as errors
bash, sh  tests/docs/commands.py
text      not code
"""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import processes
import pytest
import torch
from markdown_pages import ROOT, Block, blocks, guides

HERE = Path(__file__).parent
CC = os.environ.get("CC", "cc")
SHELLS = ("bash", "sh")
LANGUAGES = {"python", "c", *SHELLS, "text"}
GPU = "gpu"

spec = importlib.util.spec_from_file_location("commands_of_pages", HERE / "commands.py")
commands = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commands)

ALL = {page: list(blocks(page, page.read_text(encoding="utf-8"))) for page in guides()}


def chosen(*languages):
    """Yield the blocks that are tested one by one."""
    for page, found in ALL.items():
        for block in found:
            if block.language in languages and "not run" not in block.notes:
                yield pytest.param(block, id=f"{page.stem}:{block.line}")


def programs(clients):
    """Yield every page with each set of needs of its blocks: the fewer ones are met with it.

    `clients` chooses those that need client packages, or those that need none.
    """
    for page, found in ALL.items():
        runnable = [b for b in found if b.language == "python" and "not run" not in b.notes]
        for needs in sorted({b.needs for b in runnable}, key=lambda n: (len(n), sorted(n))):
            if bool(needs - {GPU}) != clients:
                continue
            name = "-".join([page.stem, *sorted(needs)])
            marks = [pytest.mark.gpu] if GPU in needs else []
            yield pytest.param([b for b in runnable if b.needs <= needs], id=name, marks=marks)


def provide(needs):
    """Return the folders that a program needs in its path; skip where something is not there."""
    folders = []
    for need in sorted(needs - {GPU}):
        if re.search(r"-\d", need):  # `make test-clients` fetches it
            folders.append(str(ROOT / "build/clients" / need))
            if not Path(folders[-1]).is_dir():
                pytest.skip(f"{folders[-1]} is not there; `make test-clients` fetches it")
        else:
            pytest.importorskip(need, reason=f"the block says that it needs {need}")
    return folders


def run_python(found, folder, *paths):
    """Run blocks as one program; return its status and what it said."""
    on_gpu = torch.cuda.is_available()
    done = processes.run(
        HERE / "run_pieces.py", folder=folder, path=[*paths, ROOT], limit=300, check=False,
        input=json.dumps([piece for block in found for piece in block.pieces()]), fresh=on_gpu,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("found", list(programs(clients=False)))
def test_python(found, tmp_path):
    status, said = run_python(found, tmp_path)
    assert status == 0, said


@pytest.mark.parametrize("found", list(programs(clients=True)))
def test_python_with_clients(found, tmp_path):
    paths = provide(frozenset().union(*(b.needs for b in found)))
    status, said = run_python(found, tmp_path, *paths)
    assert status == 0, said


@pytest.mark.parametrize("block", list(chosen("c")))
def test_c_compiles(block, tmp_path):
    source = tmp_path / "block.c"
    source.write_text(f'#line {block.line} "{block.path}"\n{block.text}', encoding="utf-8")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        [CC, *flags, f"-I{ROOT / 'csrc/include'}", str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", list(chosen(*SHELLS)))
def test_commands_exist(block):
    assert commands.check(block.text) == []


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.stem)
def test_no_block_escapes(page):
    """A block without a language, or with one that nobody runs, is a block that is not tested."""
    for block in ALL[page]:
        assert block.language in LANGUAGES, (
            f"{block.where}: a {block.language or 'fence without a language'} block; "
            f"open it with ``` and one of {', '.join(sorted(LANGUAGES))}"
        )
        assert block.notes.get("not run", "why"), f"{block.where}: `not run` says why"


# -- these tests can fail --------------------------------------------------------------------------


def parsed(text):
    return list(blocks(Path("page.md"), text))


def test_notes_belong_to_the_next_block():
    text = (
        "<!-- needs: gpu, peft -->\n<!-- setup:\nx = 1\ny = 2 -->\n\n```python\nx\n```\n"
        "- item\n\n      its second paragraph\n\n  ```bash\n  make\n  ```\nend\n\n    indented\n"
    )
    first, second, third = parsed(text)
    assert first.needs == {"gpu", "peft"} and first.line == 7
    assert first.pieces()[0] == {"path": "page.md", "text": "x = 1\ny = 2", "line": 3, "raises": ""}
    assert (second.language, second.text, second.notes) == ("bash", "make\n", {})
    assert (third.language, third.line) == ("indented", 18)
    with pytest.raises(ValueError, match="belong to no block"):
        parsed("<!-- needs: gpu -->\ntext\n")
    with pytest.raises(ValueError, match="has no end"):
        parsed("```python\nx\n")


def test_failing_python_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("one\n\n```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```\n")
    found = list(blocks(page, page.read_text()))
    status, said = run_python(found, tmp_path)
    assert status == 1 and "page.md" in said and "line 8" in said
    raising = Block(page, 8, "python", found[1].text, {"raises": "AssertionError"})
    assert run_python([found[0], raising], tmp_path)[0] == 0
    calm = Block(page, 4, "python", found[0].text, {"raises": "ValueError"})
    status, said = run_python([calm], tmp_path)
    assert status == 1 and "does not raise ValueError" in said


def test_commands_are_split():
    text = "A=1 make test B='x y'  # said\n# a comment\npython a.py \\\n  --b && pip install .\n"
    assert commands.split(text) == [
        ["make", "test", "B=x y"], ["python", "a.py", "--b"], ["pip", "install", "."]
    ]  # fmt: skip
    assert commands.split("make # it's done; really | so\nmake b") == [["make"], ["make", "b"]]


@pytest.mark.parametrize("command, said", [
    ("make no-such-target", "no-such-target"),
    ("python examples/none.py", "there is no examples/none.py"),
    ("python examples/quickstart.py --no-such-option", "--no-such-option"),
    ("python examples/quickstart.py --iters many", "many"),
    ("python setup.py no_such_command", "no_such_command"),
    ("python setup.py build_ext --no-such-option", "no-such-option"),
    ("pip install .[none]", "no extra 'none'"),
    ("pip install -c none.txt .", "there is no none.txt"),
    ("./none", "./none is no program"),
    ("frobnicate", "nothing is known about frobnicate"),
])  # fmt: skip
def test_wrong_commands_are_noticed(command, said):
    (fault,) = commands.check(command)
    assert said in fault
