"""Conversion of manifests of older schema versions to the current form."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.attention.cache_entries import equal_caches
from dsbd_runtime.parts.head.head import FULL
from dsbd_runtime.typed_json import check_counts, mismatch, typed

OLDER_VERSIONS = (3, 2)
MOST_LAYERS = 10_000


def as_current(data: dict[str, Any], version: int, where: str) -> dict[str, Any]:
    """Return a manifest of schema ``version`` in the current form; BundleError: a field missing."""
    if version < 3:
        data = _as_3(data, where)
    if version < 4:
        for role in ("target", "draft"):
            if isinstance(data.get(role), dict):
                data = data | {role: _with_caches(data[role], f"{where}: {role}")}
    return data


@dataclass(frozen=True, kw_only=True)
class _EqualLayers:
    """The ``kv`` of versions before 4: all layers cache rows of one shape."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str


def _with_caches(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an entry of version 3 with an entry for each cached layer."""
    if "kv" not in entry:
        raise BundleError(f"{where}: missing or unknown entries ['kv']; export the bundle again")
    kv = typed(_EqualLayers, entry["kv"], f"{where}: kv")
    check_counts({"num_layers": kv.num_layers}, f"{where}: kv", MOST_LAYERS)
    check_counts({"num_heads": kv.num_heads, "head_dim": kv.head_dim}, f"{where}: kv")
    caches = equal_caches(
        kv.num_layers, num_heads=kv.num_heads, head_dim=kv.head_dim, dtype=kv.dtype
    )
    others = {name: value for name, value in entry.items() if name != "kv"}
    written = [dataclasses.asdict(cache) for cache in caches]
    return others | {"num_layers": kv.num_layers, "caches": written}


def _as_3(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a manifest of version 2 as version 3: sets full_logits, and checks the draft."""
    if data.get("draft") is None:
        expected = "an entry: schema_version 2 has no bundles without one"
        raise mismatch(expected, None, f"{where}: draft")
    entries = {role: data[role] for role in ("target", "draft") if isinstance(data.get(role), dict)}
    return data | {
        role: {"full_logits": entry.get("logits") == FULL, **entry}
        for role, entry in entries.items()
    }
