# SPDX-License-Identifier: Apache-2.0
"""Write the operators' part of transformer_engine/_core.pyi, from the built extension itself.

The extension has their fields from csrc/core/fields.h. ``python tools/operator_stubs.py`` writes
what stands between the two markers; check_pyi.py finds out where that was forgotten.
"""

import inspect
import sys

from ctext import ROOT

STUB = ROOT / "transformer_engine/_core.pyi"
BEGIN = "# ---- written by tools/operator_stubs.py"
END = "# ---- end of what operator_stubs.py writes"
WIDTH = 100


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


def with_operators(text, core):
    """Return the text of the stub with the operators that the extension has."""
    before, _, rest = text.partition(BEGIN)
    heading, _, rest = rest.partition("\n")
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{STUB.name}: it lacks the lines {BEGIN!r} and {END!r}")
    operators = "\n".join(stub_of(core, name) for name in core.op_names())
    return f"{before}{BEGIN}{heading}\n\n{operators}\n{END}{after}"


def main():
    """Write the stub."""
    sys.path.insert(0, str(ROOT))
    import transformer_engine._core as core

    STUB.write_text(with_operators(STUB.read_text(), core))


if __name__ == "__main__":
    main()
