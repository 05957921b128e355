"""Errors of opening and running a bundle.

    DsbdError            every error that a user can fix (dsbd_errors)
    ├── BundleError      the bundle on disk is absent, damaged, foreign or contradictory
    ├── ProviderError    the requested execution provider or its package is missing
    ├── CapacityError    a request exceeds the model's context or the memory
    ├── InputError       an invalid argument (also a ValueError)
    └── EngineError      an engine failed in a call, or is closed

Every message says what is wrong, the value seen, the value expected and how to fix it.
"""

from dsbd_errors import DsbdError as DsbdError


class BundleError(DsbdError):
    """The bundle on disk is absent, damaged, foreign or contradictory."""


class ProviderError(DsbdError):
    """The requested execution provider or its package is not on this machine."""


class CapacityError(DsbdError):
    """A request exceeds the model's context or the memory."""


class InputError(DsbdError, ValueError):
    """An argument of a wrong shape, type or value."""


class EngineError(DsbdError):
    """An engine failed in a call, or is closed."""
