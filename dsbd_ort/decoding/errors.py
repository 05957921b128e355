"""Errors of the algorithm: a request without meaning, or a model that breaks its contract.

DsbdError                every error that a user can fix (dsbd_errors)
├── DecodingError        every error of this package (also a ValueError)
│   ├── ConfigError      a field of DecodingConfig, or a combination, that makes no sense
│   └── ConstraintError  a constraint or a processor that is invalid, or leaves no token
└── ModelError           a StepModel returned what the protocol does not allow (dsbd_forward)
"""

from dsbd_errors import DsbdError
from dsbd_forward.errors import ModelError as ModelError


class DecodingError(DsbdError, ValueError):
    """Base of the errors of the decoding package."""


class ConfigError(DecodingError):
    """A field of DecodingConfig, or a combination of fields, that makes no sense."""


class ConstraintError(DecodingError):
    """A constraint or a processor that is invalid, leaves a path no token, or breaks its word."""
