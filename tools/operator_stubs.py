# SPDX-License-Identifier: Apache-2.0
"""Write _core_names.pyi beside a built extension: what of its stub the lists of the C sources give.

``python tools/operator_stubs.py FOLDER/_core.abi3.so``, which the build runs. The constants are the
enumerators and flags of the public headers, the records its structs, with the members from
csrc/layer/records.c, the operators have their fields from csrc/core/fields.h;
transformer_engine/_core.pyi has the rest, and imports these.
"""

import importlib.machinery
import importlib.util
import inspect
import re
import sys
from pathlib import Path

NAME = "_core_names.pyi"
OTHER = Path(__file__).parents[1] / "transformer_engine/_core.pyi"
WIDTH = 100
HEADING = '''\
# SPDX-License-Identifier: Apache-2.0
"""Constants, records and operators of `_core`, written by the build (tools/operator_stubs.py)."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from transformer_engine._core import Context

# Enumerators and flags of transformer_engine.h, with what each means, are TE_<name> there.
'''


def load(path):
    """Return the extension at a path, without the package around it."""
    loader = importlib.machinery.ExtensionFileLoader("transformer_engine._core", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    core = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    return core


def record_of(record):
    """Return the definition of one record: its members have the types of their initial values."""
    lines = [f"class {record.__name__}(NamedTuple):"]
    for name, value in record._field_defaults.items():
        if type(value) in (int, float, str):
            lines.append(f"    {name}: {type(value).__name__} = {value!r}")
        else:
            lines.append(f"    {name}: {'Sequence[Any]' if type(value) is tuple else 'Any'} = ...")
    return "\n".join(lines) + "\n"


def stub_of(core, name):
    """Return the definition of one operator, in the format of ruff."""
    function = getattr(core, name)
    types = {field: kind for field, kind, _, _ in core.op_fields(name)} | {"context": "context"}
    spelled = {"tensor": "Tensor", "context": "Context"}
    arguments, keyword_only = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            arguments.append("*")
            keyword_only = True
        text = f"{p.name}: {spelled.get(types[p.name], types[p.name])}"
        if p.default is not p.empty:
            text += f"{' | None' * (p.default is None)} = {p.default!r}"
        arguments.append(text)
    text = f"def {name}({', '.join(arguments)}) -> None:"
    if len(text) > WIDTH:
        text = f"def {name}(\n    {', '.join(arguments)}\n) -> None:"
    if max(map(len, text.splitlines())) > WIDTH:
        text = "\n".join([f"def {name}(", *(f"    {a}," for a in arguments), ") -> None:"])
    return f'{text}\n    """{function.__doc__}"""\n'


def stub(core):
    """Return the whole text; what _core.pyi declares itself is left to it."""
    declared = re.findall(r"^(\w+):", OTHER.read_text(), re.MULTILINE)
    names = [name for name, value in vars(core).items() if type(value) is int]
    constants = [f"{name}: Final[int]" for name in names if name not in declared]
    records = [record_of(kind) for kind in vars(core).values() if hasattr(kind, "_field_defaults")]
    operators = [stub_of(core, name) for name in core.op_names()]
    return HEADING + "\n".join([*constants, "", *records, *operators])


def main():
    """Write the stub beside the extension that is named."""
    path = Path(sys.argv[1])
    path.with_name(NAME).write_text(stub(load(path)))


if __name__ == "__main__":
    main()
