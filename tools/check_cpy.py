# SPDX-License-Identifier: Apache-2.0
"""Check the C files for unbalanced pairs of calls and for calls that the house rules out.

Two rules need no parser: what a function (or a file) acquires it releases, and some names never
appear. A line that has to break a rule says so in a comment: `lint: allow(NAME)` and why.
"""

import re

from ctext import ROOT, blank, finish, functions

FUNCTION_PAIRS = [
    ("Py_BEGIN_ALLOW_THREADS", "Py_END_ALLOW_THREADS"),
    ("tepy_leave_gil", "tepy_retake_gil"),
    ("PyGILState_Ensure", "PyGILState_Release"),
    ("Py_EnterRecursiveCall", "Py_LeaveRecursiveCall"),
]
FILE_PAIRS = [
    ("PyEval_SaveThread", "PyEval_RestoreThread"),
    ("PyObject_GetBuffer", "PyBuffer_Release"),
    ("PyThread_allocate_lock", "PyThread_free_lock"),
]
# Outside the stable ABI of 3.11, or of a kind that hides an error or a reference.
BANNED_PYTHON = {
    r"Py(?:Tuple|List|Bytes|ByteArray|Float|Long|Unicode)_(?:[A-Z]+_)+[A-Z]+": "not in the ABI",
    r"Py_(?:REFCNT|TYPE|SIZE)\s*\([^)]*\)\s*=[^=]": "not an lvalue",
    r"PyUnicode_AsUTF8\b": "use PyUnicode_AsUTF8AndSize",
    r"PyObject_CallOneArg|PyObject_CallNoArgs(?=Not)": "not in the ABI",
    r"PyObject_Vectorcall|PyErr_(?:Get|Set)RaisedException": "from 3.12",
    r"PyType_GetModuleByDef|Py_mod_gil|PyDict_GetItemRef|PyModule_Add\b": "from 3.13",
    r"PyModule_AddObject\b": "steals only on success; use PyModule_AddObjectRef",
    r"PyState_FindModule|PyModule_Create\w*": "multi-phase init, state from the module",
    r"PyDict_GetItem(?:String)?\b": "hides errors; use PyDict_GetItemWithError",
    r"static\s+PyTypeObject": "heap types only",
    r"static\s+PyObject\s*\*\s*\w+\s*(?:=|;)": "per-module state, no globals",
}
BANNED_EVERYWHERE = {
    r"(?<![\w.>])(?:v?f?printf|puts|perror)\s*\(": "no output from the library",
    r"(?<![\w.>])(?:abort|exit|_exit|assert)\s*\(": "errors are a te_status",
    r"(?<![\w.>])(?:getenv|secure_getenv|setenv)\s*\(": "the environment is read in config.py",
    r"(?<![\w.>])(?:sprintf|strcpy|strcat|gets)\s*\(": "use snprintf or memcpy",
    r"(?<![\w.>])(?:atexit|on_exit)\s*\(": "nothing is freed behind the caller's back",
}


def check_banned(path, text, clean, rules):
    """Return the problems of one file with a table of banned patterns."""
    lines, problems = text.splitlines(), []
    for pattern, reason in rules.items():
        for match in re.finditer(pattern, clean):
            number = clean.count("\n", 0, match.start())
            word = re.match(r"[\w ]+", match[0])[0].strip()
            allowed = f"lint: allow({word})"
            if not any(allowed in line for line in lines[max(0, number - 2) : number + 1]):
                problems.append(f"{path}:{number + 1}: {word}: {reason}")
    return problems


def check_pairs(where, text, pairs):
    """Return the pairs of which a text has one half only, or unequal counts where it must."""
    problems = []
    for first, second in pairs:
        counts = [len(re.findall(rf"\b{name}\b", text)) for name in (first, second)]
        if (counts[0] == 0) != (counts[1] == 0):
            problems.append(f"{where}: {first} {counts[0]} times, {second} {counts[1]} times")
    return problems


def main():
    """Check every C file."""
    problems = []
    for path in sorted(ROOT.glob("csrc/**/*.[ch]")):
        name, text = path.relative_to(ROOT), path.read_text()
        clean = blank(text)
        problems += check_banned(name, text, clean, BANNED_EVERYWHERE)
        if name.parts[1] == "python":
            problems += check_banned(name, text, clean, BANNED_PYTHON)
            problems += check_pairs(name, clean, FILE_PAIRS)
            for function, line, body in functions(text):
                pairs = [pair for pair in FUNCTION_PAIRS if function not in pair]
                problems += check_pairs(f"{name}:{line}: {function}", body, pairs)
        elif re.search(r'#\s*include\s*[<"]Python\.h', text):
            problems.append(f"{name}: Python.h stays in csrc/python")
    finish(problems)


if __name__ == "__main__":
    main()
