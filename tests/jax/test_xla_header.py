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

# (our struct, theirs, {our member: theirs}); the last member of each is that up to which XLA fills
STRUCTS = [
    ("extension", "Extension_Base", {"type": "type", "next": "next"}),
    ("version", "Api_Version", {"major": "major_version", "minor": "minor_version"}),
    ("metadata", "Metadata", {"version": "api_version", "traits": "traits"}),
    ("metadata_extension", "Metadata_Extension", {"base": "extension_base", "metadata": "metadata"}),
    ("buffer", "Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    ("buffers", "Args", {"size": "size", "types": "types", "buffers": "args"}),
    ("buffers", "Rets", {"size": "size", "types": "types", "buffers": "rets"}),
    ("span", "ByteSpan", {"text": "ptr", "length": "len"}),
    ("scalar", "Scalar", {"dtype": "dtype", "value": "value"}),
    ("array", "Array", {"dtype": "dtype", "size": "size", "data": "data"}),
    ("attributes", "Attrs", {"size": "size", "types": "types", "names": "names", "values": "attrs"}),
    ("error_request", "Error_Create_Args", {"message": "message", "code": "errc"}),
    ("stream_request", "Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    (
        "api",
        "Api",
        {
            "version": "api_version",
            "internal": "internal_api",
            "create_error": "XLA_FFI_Error_Create",
            "get_stream": "XLA_FFI_Stream_Get",
        },
    ),
    (
        "frame",
        "CallFrame",
        {
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "arguments": "args",
            "results": "rets",
            "attributes": "attrs",
        },
    ),
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
    for ours, theirs, members in STRUCTS:
        for own, other in members.items():
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
    folders = [f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'csrc'}"]
    command = [CC, "-std=c11", "-fsyntax-only", *folders, str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_structs_and_numbers_are_those_of_xla(tmp_path):
    done = compile_with([f'_Static_assert({that}, "{that}");' for that in assertions()], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wrong_offset_is_found(tmp_path):
    that = "offsetof(te_xla_frame, stage) == offsetof(XLA_FFI_CallFrame, ctx)"
    done = compile_with([f'_Static_assert({that}, "");'], tmp_path)
    assert "static assertion failed" in done.stderr
