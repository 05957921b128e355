"""Python side of libdsbd: functions called from C, which return a status and never raise.

They run in the thread that called the library. It is not a Python thread; cffi attaches it during
the call. ``ffi`` and ``lib`` are the library's, see library_build.py.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.engine import QueueFullError, Service, ServiceEvent, ServiceLimits
from dsbd_ort.engine.async_stream import result_or_raise
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_ort.requests.prompts import check_context
from dsbd_ort.requests.results import GenerationResult, StreamPiece, json_text, result_object
from dsbd_ort.version import __version__
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short


def decoded(name: str, content: bytes) -> str:
    """Decode UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is invalid UTF-8: byte 0x{content[error.start]:02x} at {error.start}"
        ) from error


def json_object(name: str, content: bytes | None) -> dict[str, Any]:
    """Return the fields of a JSON object; {} for None."""
    if content is None:
        return {}
    fields = _json(name, content)
    if not isinstance(fields, dict):
        raise InputError(f"{name} is {_start(content)}; expected a JSON object")
    return fields


def json_messages(content: bytes) -> list[Any]:
    """Return the messages of a chat."""
    messages = _json("messages", content)
    if not isinstance(messages, list):
        raise InputError(
            f"messages is {_start(content)}; expected a JSON array such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    return messages


def opening(bundle: bytes, settings: bytes | None) -> tuple[PipelineSettings, ServiceLimits]:
    """Return the arguments of dsbd_open; InputError, ConfigError: a setting is invalid."""
    given = json_object("settings", settings)
    of_limits = {field.name for field in fields(ServiceLimits)}
    names = of_limits | {field.name for field in fields(PipelineOptions)}
    for name in given.keys() - names:
        expected = did_you_mean(name, names) or f"; expected one of {', '.join(sorted(names))}"
        raise InputError(f"settings has {in_short(name)}{expected}")
    limits = {name: given.pop(name) for name in of_limits & given.keys()}
    options = PipelineOptions.of(given)
    folder = Path(decoded("bundle", bundle))
    return PipelineSettings(bundle=folder, **vars(options)), ServiceLimits(**limits)


def _json(name: str, content: bytes) -> Any:
    text = decoded(name, content)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is invalid JSON ({error}): {_start(content)}") from error


def _start(content: bytes) -> str:
    text = decoded("text", content)
    return text if len(text) <= 40 else f"{text[:40]}..."


_log = logging.getLogger(__name__)
_MOST_BYTES = 2000  # longest message; last_error of library.c holds a little more


class BuildError(DsbdError):
    """The C library cannot be built here, or was built for another version."""


def join(ffi: Any, lib: Any, *, built_for: str) -> None:
    """Register this module's functions as those that python_calls.h declares."""
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
    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi = ffi
        self._lib = lib
        self._pipelines = OpenPipelines()

    def with_status(self, call: Callable[..., int]) -> Callable[..., int]:
        """Return ``call`` with exceptions turned into a status and a message that C can read."""

        def guarded(*arguments: Any) -> int:
            try:
                return call(*arguments)
            except QueueFullError as error:
                return self._failed(self._lib.DSBD_QUEUE_FULL, str(error))
            except InternalError as error:
                return self._failed(self._lib.DSBD_INTERNAL, str(error))
            except DsbdError as error:
                return self._failed(self._lib.DSBD_ERROR, str(error))
            except BaseException as error:  # no exception may pass through C
                _log.debug("a call of the C library", exc_info=True)
                text = f"internal error, {type(error).__name__}: {error}"
                return self._failed(self._lib.DSBD_INTERNAL, text)

        return guarded

    def open(self, bundle: Any, settings: Any, number: Any) -> int:
        given = opening(self._ffi.string(bundle), self._bytes(settings))
        number[0] = self._pipelines.open(*given)
        return self._ok()

    def generate(self, number: int, request: Any, result: Any) -> int:
        service = self._pipelines.service(number)
        options = json_object("options", self._bytes(request.options))
        prompt = self._prompt(service, request)
        given = answer(service, prompt, options, self._on_step(request))
        if given is None:
            return self._failed(self._lib.DSBD_CANCELLED, "cancelled by on_step")
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

    def _on_step(self, request: Any) -> Callable[[StreamPiece], bool]:
        if not request.on_step:
            return lambda step: True

        def call_on_step(step: StreamPiece) -> bool:
            text = step.text.encode()
            parts = (
                self._ffi.new("int64_t[]", step.token_ids),
                self._ffi.new("double[]", step.token_logprobs),
                len(step.token_ids),
                self._ffi.new("char[]", text),
                len(text),
            )
            c_step = self._ffi.new("dsbd_step *", parts)
            return bool(request.on_step(c_step, request.on_step_context) == 0)

        return call_on_step

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


def answer(
    service: Service,
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    on_step: Callable[[StreamPiece], bool],
) -> GenerationResult | None:
    """Answer a request in the calling thread; None if ``on_step`` returned False to cancel it."""
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    request = service.submit(prompt, options, events.put)
    try:
        while isinstance(event := events.get(), StreamPiece):
            if not on_step(event):
                return None
        return result_or_raise(event)
    finally:
        request.cancel()


class OpenPipelines:
    """Open pipelines by the numbers that C uses for them: from 1, never reused. Thread-safe."""

    def __init__(self) -> None:
        self._service_by_number: dict[int, Service] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def open(self, settings: PipelineSettings, limits: ServiceLimits) -> int:
        with contextlib.ExitStack() as stack:
            service = Service(stack.enter_context(settings.open()), limits)
            stack.pop_all()  # it stays open
        with self._lock:
            number = next(self._numbers)
            self._service_by_number[number] = service
        return number

    def service(self, number: int) -> Service:
        with self._lock:
            return _opened(self._service_by_number.get(number))

    def close(self, number: int) -> None:
        """Refuse new requests, finish those of other threads, then release the engines."""
        with self._lock:
            service = _opened(self._service_by_number.pop(number, None))
        service.close()
        service.pipeline.close()


def _opened(service: Service | None) -> Service:
    if service is None:
        raise InputError(
            "this pipeline is not open; pass one that dsbd_open returned and that is not closed yet"
        )
    return service
