"""Exports that several folders of tests read: the demo pair, and pairs of tiny families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle
from scripts.family_checkpoints import write_family_checkpoint
from scripts.shared_captures import SharedCaptures
from scripts.speech_checkpoint import write_whisper


def export_quietly(
    captures: SharedCaptures,
    output: Path,
    target: Path,
    draft: Path | str | None = None,
    **options: Any,
) -> Path:
    """Export a pair, or a target alone, with what was captured before; return ``output``."""
    sources = {"target": str(target), "draft": None if draft is None else str(draft)}
    config = ExportConfig(**sources, output=output, **options)
    export_bundle(config, report=lambda _: None, source_of=captures)
    return output


def export_demo_pair(captures: SharedCaptures, output: Path, **options: Any) -> Path:
    return export_quietly(captures, output, *demo_pair(), **options)


def export_whispers(captures: SharedCaptures, folder: Path) -> Path:
    """Fill a folder with the checkpoints "target" and "english", and their bundles."""
    target = write_whisper(folder / "target")
    draft = write_whisper(folder / "draft", decoder_layers=1, encoder_layers=1)
    export_quietly(captures, folder / "bundle", target, draft)
    english = write_whisper(folder / "english", multilingual=False)
    export_quietly(captures, folder / "english-bundle", english)
    return folder


def family_pair(
    target: str, draft: str, **options: Any
) -> tuple[str, Callable[[SharedCaptures, Path], Path]]:
    """Return a name for ``made_once``, and a function that fills a folder.

    The folder has "bundle", and the checkpoints by the names of their families.
    """

    def make(captures: SharedCaptures, folder: Path) -> Path:
        folders = [write_family_checkpoint(name, folder / name) for name in (target, draft)]
        export_quietly(captures, folder / "bundle", *folders, **options)
        return folder

    return "-".join(map(str, (target, draft, *options.values()))), make
