"""Demo pair: a trained target and draft in the checkout; the wheel does not contain them."""

from pathlib import Path

from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.bundle import ROLES, TOKENIZER_FILE

DEMO_PAIR = Path(__file__).parent / "demo_pair"
_FILES = ("config.json", "model.safetensors", TOKENIZER_FILE)


def demo_pair(root: Path = DEMO_PAIR) -> tuple[Path, Path]:
    """Return the folders of the target and of the draft."""
    target, draft = (root / role for role in ROLES)
    for file in (folder / name for folder in (target, draft) for name in _FILES):
        if not file.is_file():
            raise ExportError(
                f"the demo pair is incomplete: no {file}; it is in a checkout of dsbd-ort, not in "
                "its wheel: run scripts/demo there, or give --target (and --draft)"
            )
    return target, draft
