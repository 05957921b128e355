"""Errors of the export of a checkpoint: ExportError, a subclass of DsbdError (dsbd_errors)."""

from collections.abc import Iterator

from dsbd_errors import DsbdError


class ExportError(DsbdError):
    """An option, a checkpoint, a pair or an exported graph is not usable."""


def reason_of(error: BaseException) -> str:
    """Return the reason of a library's failure: the first line of the innermost cause."""
    innermost = list(_causes(error))[-1]
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    return f"{type(innermost).__name__}: {lines[0]}" if lines else type(innermost).__name__


def own_error_in(error: BaseException) -> ExportError | None:
    """Return the ExportError among the causes of ``error``, or None."""
    return next((cause for cause in _causes(error) if isinstance(cause, ExportError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
