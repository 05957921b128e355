"""What can go wrong when a bundle is opened or run.

    DsbdError            every error that a user can mend (dsbd_errors)
    ├── BundleError      the bundle on disk is absent, damaged, foreign or contradictory
    ├── ProviderError    the asked execution provider or its package is not here
    ├── CapacityError    a request does not fit the model's context or the memory
    ├── InputError       an argument that no model could take (also a ValueError)
    └── EngineError      an engine failed in a call, or is closed

Every message says what is wrong, the value seen, the value wanted and how to mend it.
"""

from dsbd_errors import DsbdError

__all__ = [
    "BundleError",
    "CapacityError",
    "DsbdError",
    "EngineError",
    "InputError",
    "ProviderError",
]


class BundleError(DsbdError):
    """The bundle on disk is absent, damaged, foreign or contradictory."""


class ProviderError(DsbdError):
    """The asked execution provider or its package is not on this machine."""


class CapacityError(DsbdError):
    """A request does not fit the model's context or the memory."""


class InputError(DsbdError, ValueError):
    """An argument of a wrong shape, type or value."""


class EngineError(DsbdError):
    """An engine failed in a call, or is closed."""
