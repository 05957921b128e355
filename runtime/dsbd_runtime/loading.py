"""From a bundle to models that step, alone or as the pair that shares a processor."""

from __future__ import annotations

from dsbd_runtime.bundle import WEIGHTS_FILE, Bundle
from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.ort_session import OrtSession

SMALL_DRAFT_BYTES = 32 * 2**20


def load_causal_lm(
    bundle: Bundle,
    role: str,
    *,
    provider: str = "cpu",
    num_threads: int | None = None,
    spins: bool = True,
) -> CausalLM:
    """Open the "target" or the "draft" of a bundle; use it as a context manager.

    Args:
        bundle: from ``open_bundle``.
        role: "target" or "draft".
        provider: where it runs, a name of the table in ``providers``.
        num_threads: threads of one call; None leaves the choice to ONNX Runtime.
        spins: whether idle threads of the engine wait busily for the next call.

    Raises:
        BundleError: the engine is damaged or contradicts the manifest.
        ProviderError: the provider or its package is not on this machine.
    """
    entry = bundle.entry(role)
    session = OrtSession(
        bundle.model_path(role), entry, provider=provider, num_threads=num_threads, spins=spins
    )
    return CausalLM(session, entry)


def load_pair(
    bundle: Bundle, *, provider: str = "cpu", num_threads: int | None = None
) -> tuple[CausalLM, CausalLM]:
    """Open target and draft so that they do not take each other's cores.

    Two pools of busily waiting threads on the same cores make each other wait: the target's calls
    took twice as long (docs/performance.md). So a small draft, whose calls are over before a second
    thread has begun, gets one thread and no pool; beside a larger one nobody waits busily.

    See ``load_causal_lm`` for arguments and errors.
    """
    weights = bundle.manifest.files.get(f"draft/{WEIGHTS_FILE}")
    is_small = weights is None or weights.size <= SMALL_DRAFT_BYTES
    target = load_causal_lm(
        bundle, "target", provider=provider, num_threads=num_threads, spins=is_small
    )
    try:
        draft = load_causal_lm(
            bundle,
            "draft",
            provider=provider,
            num_threads=1 if is_small else num_threads,
            spins=is_small,
        )
    except BaseException:
        target.close()
        raise
    return target, draft
