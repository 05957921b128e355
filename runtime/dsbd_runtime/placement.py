"""Where an engine runs: a provider and, for a GPU, its number, written "cuda:1"."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_runtime.errors import ProviderError
from dsbd_runtime.providers import Provider, find_provider


@dataclass(frozen=True)
class Placement:
    """A provider and the number of its device, 0 where it has none."""

    provider: Provider
    device_id: int


def parse_placement(text: str) -> Placement:
    """Return what "cpu", "cuda" (the first GPU) or "cuda:1" stands for.

    Raises ProviderError for an unknown provider or anything else behind a colon than a number.
    """
    name, colon, number = text.partition(":")
    provider = find_provider(name)
    if not colon:
        return Placement(provider, 0)
    if not provider.has_device_caches:
        raise ProviderError(f"provider {text!r}: {name} has no numbered devices; write {name!r}")
    if not (number.isascii() and number.isdigit()):
        raise ProviderError(
            f"provider {text!r} names the device {number!r}, expected a number: '{name}:0'"
        )
    return Placement(provider, int(number))
