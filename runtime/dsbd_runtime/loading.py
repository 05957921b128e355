"""From a bundle to models that step."""

from __future__ import annotations

from dsbd_runtime.bundle import Bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.ort_session import OrtSession


def load_causal_lm(
    bundle: Bundle, role: str, *, provider: str = "cpu", num_threads: int | None = None
) -> CausalLM:
    """Open the "target" or the "draft" of a bundle; use it as a context manager.

    Args:
        bundle: from ``open_bundle``.
        role: "target" or "draft".
        provider: where it runs, a name of the table in ``providers``.
        num_threads: threads of one call; None leaves the choice to ONNX Runtime.

    Raises:
        BundleError: the engine is damaged or contradicts the manifest.
        ProviderError: the provider or its package is not on this machine.
    """
    entry = bundle.entry(role)
    session = OrtSession(bundle.model_path(role), entry, provider=provider, num_threads=num_threads)
    return CausalLM(session, entry)
