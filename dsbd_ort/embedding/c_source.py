"""The C file that joins the library's C functions to Python; cffi writes it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from cffi import FFI

from dsbd_ort.version import __version__

MODULE = "_dsbd_library"
FOLDER = Path(__file__).parent
_START = f"""\
from {MODULE} import ffi, lib
from dsbd_ort.embedding.calls import join
join(ffi, lib, built_for={__version__!r})
"""


def c_source() -> str:
    """Return the text of the file; it is compiled with library.c and interpreter.c."""
    ffi = FFI()
    ffi.embedding_api("")
    ffi.cdef(_declarations("dsbd.h"))
    ffi.cdef(f'extern "Python+C" {{ {_declarations("python_calls.h")} }}')
    ffi.cdef(_declarations("library.h"))
    ffi.embedding_init_code(_START)
    ffi.set_source(
        MODULE,
        '#include "library.h"\nint dsbd_start_calls(void) { return cffi_start_python(); }',
        compiler_verbose=0,
    )
    written = io.StringIO()
    ffi.emit_c_code(written)
    return written.getvalue()


def _declarations(header: str) -> str:
    """Return a header without what is the preprocessor's, of which cffi reads nothing."""
    text = (FOLDER / header).read_text(encoding="utf-8")
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("DSBD_API ", "")
