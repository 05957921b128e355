"""What the C library asks of Python: four functions that answer with a status, never an exception.

They run in the thread that called the library, which holds no Python of its own: cffi gives it one
for the time of the call. ``ffi`` and ``lib`` are those of the library, see c_source.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.embedding.answer import answer
from dsbd_ort.embedding.arguments import decoded, json_messages, json_object, opening
from dsbd_ort.embedding.errors import BuildError
from dsbd_ort.embedding.open_pipelines import OpenPipelines
from dsbd_ort.engine import QueueFullError, Service
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.generated import StreamStep
from dsbd_ort.json_output import json_text, result_object
from dsbd_ort.prompt_ids import check_context
from dsbd_ort.version import __version__

_log = logging.getLogger(__name__)
_MOST_BYTES = 2000
"""Of a message; last_error of library.c holds a little more."""


def join(ffi: Any, lib: Any, *, built_for: str) -> None:
    """Make the functions of python_calls.h those of this module."""
    if built_for != __version__:
        raise BuildError(
            f"libdsbd.so was built for dsbd-ort {built_for}, this environment has {__version__}; "
            "run scripts/build_c_library again"
        )
    calls = _Calls(ffi, lib)
    for call in (calls.open, calls.generate, calls.stats, calls.close):
        ffi.def_extern(name=f"dsbd_python_{call.__name__}", error=lib.DSBD_INTERNAL)(
            calls.with_status(call)
        )


class _Calls:
    """The four functions; each returns a status, and raises what ``with_status`` translates."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi = ffi
        self._lib = lib
        self._pipelines = OpenPipelines()

    def with_status(self, call: Callable[..., int]) -> Callable[..., int]:
        """Return ``call`` with a status for every exception, whose message is kept for C."""

        def guarded(*arguments: Any) -> int:
            try:
                return call(*arguments)
            except QueueFullError as error:
                return self._failed(self._lib.DSBD_QUEUE_FULL, str(error))
            except InternalError as error:
                return self._failed(self._lib.DSBD_INTERNAL, str(error))
            except DsbdError as error:
                return self._failed(self._lib.DSBD_ERROR, str(error))
            except BaseException as error:  # nothing may pass through C
                _log.debug("a call of the C library", exc_info=True)
                text = f"internal error, {type(error).__name__}: {error}"
                return self._failed(self._lib.DSBD_INTERNAL, text)

        return guarded

    def open(self, bundle: Any, settings: Any, number: Any) -> int:
        asked = opening(self._ffi.string(bundle), self._bytes(settings))
        number[0] = self._pipelines.open(asked)
        return self._ok()

    def generate(self, number: int, request: Any, result: Any) -> int:
        service = self._pipelines.service(number)
        options = json_object("options", self._bytes(request.options))
        prompt = self._prompt(service, request)
        given = answer(service, prompt, options, self._is_wanted(request))
        if given is None:
            return self._failed(self._lib.DSBD_CANCELLED, "cancelled, as on_step asked")
        if result:
            result[0] = self._copied(json_text(result_object(given)))
        return self._ok()

    def stats(self, number: int, stats: Any) -> int:
        fields = dataclasses.asdict(self._pipelines.service(number).stats())
        stats[0] = self._copied(json_text(fields))
        return self._ok()

    def close(self, number: int) -> int:
        self._pipelines.close(number)
        return self._ok()

    def _prompt(self, service: Service, request: Any) -> str | list[int]:
        if request.prompt:
            return decoded("prompt", self._ffi.string(request.prompt))
        if request.messages:
            return service.pipeline.chat_prompt(json_messages(self._ffi.string(request.messages)))
        check_context(service.pipeline.bundle, request.num_prompt_ids, 0)  # before they are read
        ids: list[int] = self._ffi.unpack(request.prompt_ids, request.num_prompt_ids)
        return ids

    def _is_wanted(self, request: Any) -> Callable[[StreamStep], bool]:
        if not request.on_step:
            return lambda step: True

        def tell(step: StreamStep) -> bool:
            text = step.text.encode()
            parts = (
                self._ffi.new("int64_t[]", step.token_ids),
                self._ffi.new("double[]", step.token_logprobs),
                len(step.token_ids),
                self._ffi.new("char[]", text),
                len(text),
            )
            told = self._ffi.new("dsbd_step *", parts)
            return bool(request.on_step(told, request.on_step_context) == 0)

        return tell

    def _bytes(self, text: Any) -> bytes | None:
        return self._ffi.string(text) if text else None

    def _copied(self, text: str) -> Any:
        copy = self._lib.dsbd_copy_text(text.encode())
        if not copy:
            raise MemoryError("no memory for the text of the result")
        return copy

    def _ok(self) -> int:
        status: int = self._lib.DSBD_OK
        return status

    def _failed(self, status: int, message: str) -> int:
        line = " ".join(message.split()).replace("\0", "")
        self._lib.dsbd_set_error(line.encode(errors="replace")[:_MOST_BYTES])
        return status
