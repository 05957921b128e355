"""Opening of checkpoints: they are found, recognized and described; no weights are read."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dsbd_export.checkpoints.adapter import read_adapter
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import located, located_adapter
from dsbd_export.checkpoints.checkpoint_reading import CheckpointFiles, GgufFiles
from dsbd_export.checkpoints.other_weights import refusal_of_files
from dsbd_export.config import DraftConfig, ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.model_kinds import KINDS, kind_of


def open_pair(options: ExportConfig) -> tuple[Checkpoint, Checkpoint | None]:
    """Find the target and the draft, if one is given, and read their configs, not weights."""
    sources = {"target": options.target}
    if options.draft is not None:
        sources["draft"] = options.draft
    opened = _opened(sources, options)
    draft = opened.get("draft")
    if draft is not None:
        draft = _adapted(draft, options.draft_adapter)
    return _adapted(opened["target"], options.adapter), draft


def open_target(source: str, options: ModelOptions) -> Checkpoint:
    """Find a target and read its config, not its weights."""
    return _checked_tokens(_opened({"target": source}, options)["target"])


def open_draft(options: DraftConfig) -> Checkpoint:
    """Find the draft and read its config, not its weights."""
    return _adapted(_opened({"draft": options.draft}, options)["draft"], options.draft_adapter)


def _opened(sources: Mapping[str, str], options: ModelOptions) -> dict[str, Checkpoint]:
    """Return the checkpoints by role, "target" and "draft", for the given sources."""
    if options.revision is not None and all(Path(each).exists() for each in sources.values()):
        are = "are both local" if len(sources) == 2 else "is local"
        raise ExportError(
            f"revision={options.revision!r} has no meaning: {' and '.join(sources)} {are}; "
            "leave it out or give a hub id"
        )
    places = {role: located(source, options) for role, source in sources.items()}
    return {
        role: (_open_gguf if place.is_file() else open_checkpoint)(role, place, options)
        for role, place in places.items()
    }


def open_checkpoint(role: str, folder: Path, options: ModelOptions) -> Checkpoint:
    """Read the config files in ``folder``; ``role`` is "target" or "draft"."""
    if reason := refusal_of_files(role, folder):
        raise ExportError(f"the {role} at {folder} {reason}")
    if not (folder / "config.json").is_file():
        raise ExportError(
            f"the {role} at {folder} has no config.json; give a checkpoint folder"
            f"{_instead_of_folder(folder)}"
        )
    return _read(CheckpointFiles(role, folder, options))


def _open_gguf(role: str, file: Path, options: ModelOptions) -> Checkpoint:
    return _read(GgufFiles(role, file.parent, options, file.name))


def _read(files: CheckpointFiles) -> Checkpoint:
    return next(kind for kind in KINDS if kind.recognizes(files)).read(files)


def _instead_of_folder(folder: Path) -> str:
    found = sorted(folder.glob("*.gguf"))
    return f", or a GGUF file, such as {found[0]}" if found else ""


def _adapted(checkpoint: Checkpoint, source: str | None) -> Checkpoint:
    """Return the checkpoint with an adapter, a folder or a hub id; None: without an adapter."""
    if source is None:
        return _checked_tokens(checkpoint)
    if reason := kind_of(checkpoint).without_adapters:
        raise ExportError(f"the {checkpoint.role} at {checkpoint.folder} is {reason}")
    adapter = read_adapter(source, located_adapter(source))
    grown = adapter.grown(checkpoint.vocab_size)
    return _checked_tokens(replace(checkpoint, adapter=adapter, vocab_size=grown))


def _checked_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint; raise ExportError unless its special tokens are in its vocabulary."""
    checkpoint = _without_default_tokens(checkpoint)
    bos = [] if checkpoint.bos_token_id is None else [checkpoint.bos_token_id]
    for name, tokens in (("bos_token_id", bos), ("eos_token_id", checkpoint.eos_token_ids)):
        for token in tokens:
            if not 0 <= token < checkpoint.vocab_size:
                raise ExportError(
                    f"the {checkpoint.role} at {checkpoint.folder} has {name} {token}, expected a "
                    f"token of its vocabulary, 0 to {checkpoint.vocab_size - 1}; change it in "
                    "generation_config.json or config.json"
                )
    return checkpoint


def _without_default_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without the default ids of its config's class beyond its vocabulary."""
    defaults = type(checkpoint.config)()
    bos, eos = (getattr(defaults, name, None) for name in ("bos_token_id", "eos_token_id"))
    size = checkpoint.vocab_size
    if isinstance(bos, int) and bos >= size and checkpoint.bos_token_id == bos:
        checkpoint = replace(checkpoint, bos_token_id=None)
    if isinstance(eos, int) and eos >= size and checkpoint.eos_token_ids == [eos]:
        checkpoint = replace(checkpoint, eos_token_ids=[])
    return checkpoint
