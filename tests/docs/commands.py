# SPDX-License-Identifier: Apache-2.0
"""Check the shell commands of a page: their programs, files, targets and options exist.

Nothing is built, installed, trained or downloaded. Programs in Python parse their arguments.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parents[2]
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
OPERATORS = {"&&", "||", "|", ";"}


def split(text: str) -> list[list[str]]:
    """Return the words of each command, without comments and variables set for it."""
    commands: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        words.whitespace_split, words.commenters = True, "#"
        commands.append([])
        for word in words:
            if word in OPERATORS:
                commands.append([])
            elif commands[-1] or not ASSIGNMENT.match(word):
                commands[-1].append(word)
    return [command for command in commands if command]


def run(command: list[str]) -> str:
    """Run a command at the root; return what it said where it failed."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        command, cwd=ROOT, input="", capture_output=True, text=True, timeout=300,
        env={**environment, "PYTHONPATH": path},
    )  # fmt: skip
    return done.stdout + done.stderr if done.returncode else ""


def check_make(words: list[str]) -> str:
    """Let make say what it would do."""
    return run(["make", "-n", *words])


def check_pip(words: list[str]) -> str:
    """Look at the local folders, extras and files that `pip install` is given."""
    if words[:1] != ["install"]:
        return f"pip {' '.join(words)}: only `pip install` can be checked"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words[1:]:
        local = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word)
        for extra in (local[1] or "").split(",") if local else []:
            if extra and extra not in project["optional-dependencies"]:
                return f"pyproject.toml has no extra {extra!r}"
        if word.endswith(".txt") and not (ROOT / word).exists():
            return f"there is no {word}"
    return ""


def check_setup(words: list[str]) -> str:
    """Ask setup.py for the help of its command, in which every option must be."""
    done = run([sys.executable, "setup.py", *words, "--help"])
    return done


def check_command(words: list[str]) -> tuple[str, list[list[str]]]:
    """Return what is wrong with a command, and the Python programs that have to parse it."""
    program, rest = words[0], words[1:]
    if program == "make":
        return check_make(rest), []
    if program == "pip":
        return check_pip(rest), []
    if re.fullmatch(r"python3?", program):
        if rest[:2] == ["-m", "pip"]:
            return check_pip(rest[2:]), []
        if rest[:2] == ["-m", "pytest"]:
            return run([sys.executable, *rest, "--collect-only", "-q"]), []
        if rest[:1] == ["-m"]:
            return ("" if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"), []
        if rest[:1] == ["-c"]:
            compile(rest[1], "-c", "exec")
            return "", []
        if rest[:1] == ["setup.py"]:
            return check_setup(rest[1:]), []
        return ("", [rest]) if (ROOT / rest[0]).is_file() else (f"there is no {rest[0]}", [])
    if program in (".", "source") and rest == [".venv/bin/activate"]:
        return "", []  # of the environment that make makes
    file = ROOT / program
    if "/" in program:
        return "" if os.access(file, os.X_OK) else f"{program} is no program", []
    return f"nothing is known about {program}: say `<!-- not run: why -->` before the block", []


def check(text: str) -> list[str]:
    """Return what is wrong with the commands of a block."""
    faults, programs = [], []
    for words in split(text):
        fault, parsed = check_command(words)
        faults += [f"{shlex.join(words)}: {fault}"] if fault else []
        programs += parsed
    if programs and not faults:
        parser = Path(__file__).with_name("parse_commands.py")
        done = processes.run(
            parser, folder=ROOT, path=[ROOT], input=json.dumps(programs), check=False
        )
        faults += [done.stdout + done.stderr] if done.returncode else []
    return faults
