# SPDX-License-Identifier: Apache-2.0
"""Our header of XLA's interface against the one that the installed jaxlib comes with."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
CC = os.environ.get("CC", "cc")

pytestmark = pytest.mark.skipif(
    shutil.which(CC) is None or not (ROOT / "csrc/xla/ffi.h").exists(),
    reason="needs the source tree and a C compiler",
)

HEADERS = Path(jax.ffi.include_dir())
RENAMED = "InternalExtension" in (HEADERS / "xla/ffi/api/c_api.h").read_text()  # in JAX 0.11

# Our struct, theirs, and the members of both.
STRUCTS = [
    ("extension", "InternalExtension" if RENAMED else "Extension_Base", "type next", "type next"),
    ("version", "Api_Version", "major minor", "major_version minor_version"),
    ("metadata", "Metadata", "version traits", "api_version traits"),
    ("metadata_extension", "Metadata_Extension", "base metadata", "extension_base metadata"),
    ("buffer", "Buffer", "dtype data rank dims", "dtype data rank dims"),
    ("buffers", "Args", "size types buffers", "size types args"),
    ("buffers", "Rets", "size types buffers", "size types rets"),
    ("span", "ByteSpan", "text length", "ptr len"),
    ("scalar", "Scalar", "dtype value", "dtype value"),
    ("array", "Array", "dtype size data", "dtype size data"),
    ("attributes", "Attrs", "size types names values", "size types names attrs"),
    ("error_request", "Error_Create_Args", "message code", "message errc"),
    ("stream_request", "Stream_Get_Args", "context stream", "ctx stream"),
    ("api", "Api", "version internal", "api_version internal_api"),
    ("api", "Api", "create_error get_stream", "XLA_FFI_Error_Create XLA_FFI_Stream_Get"),
    ("frame", "CallFrame", "api context stage", "api ctx stage"),
    ("frame", "CallFrame", "arguments results attributes", "args rets attrs"),
]
VALUES = {
    "TE_XLA_INSTANTIATE": "XLA_FFI_ExecutionStage_INSTANTIATE",
    "TE_XLA_PREPARE": "XLA_FFI_ExecutionStage_PREPARE",
    "TE_XLA_INITIALIZE": "XLA_FFI_ExecutionStage_INITIALIZE",
    "TE_XLA_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "TE_XLA_ARGUMENT_BUFFER": "XLA_FFI_ArgType_BUFFER",
    "TE_XLA_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "TE_XLA_COMMAND_BUFFER_COMPATIBLE": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    **{
        f"TE_XLA_ATTRIBUTE_{name}": f"XLA_FFI_AttrType_{name}"
        for name in ("ARRAY", "DICTIONARY", "SCALAR", "STRING")
    },
    **{
        f"TE_XLA_{name}": f"XLA_FFI_Error_Code_{name}"
        for name in "CANCELLED INVALID_ARGUMENT RESOURCE_EXHAUSTED FAILED_PRECONDITION "
        "UNIMPLEMENTED INTERNAL".split()
    },
    **{
        f"TE_XLA_{name}": f"XLA_FFI_DataType_{name}"
        for name in "PRED S32 S64 U8 U32 F16 F32 F64 BF16 F8E5M2 F8E4M3FN F8E8M0FNU".split()
    },
}


def assertions():
    for ours, theirs, *members in STRUCTS:
        for own, other in zip(*map(str.split, members), strict=True):
            yield f"offsetof(te_xla_{ours}, {own}) == offsetof(struct XLA_FFI_{theirs}, {other})"
            sizes = f"((te_xla_{ours} *)0)->{own}", f"((struct XLA_FFI_{theirs} *)0)->{other}"
            yield " == ".join(f"sizeof({member})" for member in sizes)
    for own, other in VALUES.items():
        yield f"(int){own} == (int){other}"
    yield "XLA_FFI_API_MAJOR == TE_XLA_MAJOR && XLA_FFI_API_MINOR >= TE_XLA_MINOR"


def compile_with(lines, folder):
    source = folder / "headers.c"
    head = ["#include <xla/ffi/api/c_api.h>", "#include <xla/ffi.h>"]
    source.write_text("\n".join([*head, *lines]) + "\n")
    folders = [f"-I{HEADERS}", f"-I{ROOT / 'csrc'}"]
    command = [CC, "-std=c11", "-fsyntax-only", *folders, str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_structs_and_numbers_are_those_of_xla(tmp_path):
    done = compile_with([f'_Static_assert({that}, "{that}");' for that in assertions()], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wrong_offset_is_found(tmp_path):
    that = "offsetof(te_xla_frame, stage) == offsetof(XLA_FFI_CallFrame, ctx)"
    done = compile_with([f'_Static_assert({that}, "");'], tmp_path)
    assert "static assertion failed" in done.stderr
