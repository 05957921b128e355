"""What can go wrong around a measurement: what is asked, and the files that are written.

DsbdError             every error that a user can mend (dsbd_errors)
└── BenchmarkError    runs or prompts that cannot be measured, a package that is missing
"""

from dsbd_errors import DsbdError


class BenchmarkError(DsbdError, ValueError):
    """Runs or prompts that cannot be measured, or a package that is missing."""
