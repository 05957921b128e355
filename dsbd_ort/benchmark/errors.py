"""What can go wrong before anything is measured.

BenchmarkError    runs or prompts that cannot be measured, a package that is missing
"""

from __future__ import annotations


class BenchmarkError(ValueError):
    """Runs or prompts that cannot be measured, or a package that is missing."""
