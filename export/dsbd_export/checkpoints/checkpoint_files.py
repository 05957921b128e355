"""Location of a checkpoint's files: on this machine, or downloaded from the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from dsbd_export.checkpoints.gguf_file import is_gguf
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError, reason_of

_HUB_FILES = [
    "*.json",
    "*.jinja",
    "*.safetensors",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
]
_HUB_CODE = ["*.py"]
_HUB_OLD_WEIGHTS = ["pytorch_model*.bin"]
_HUB_OLD_ADAPTERS = ["adapter_model.bin"]


def located(source: str, options: ModelOptions) -> Path:
    """Return a checkpoint's folder, downloaded from the hub if it is not local, or GGUF file."""
    folder = Path(source).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    if folder.is_file() or source.endswith(".gguf"):
        what = "is not a GGUF file" if folder.is_file() else "does not exist"
        raise ExportError(
            f"the file {source} {what}; give a folder with config.json, a hub id, or a GGUF file "
            "on this machine"
        )
    _check_hub_id("checkpoint", source, "config.json")
    wanted = [*_HUB_FILES, *(_HUB_CODE if options.trust_remote_code else [])]
    return _downloaded(source, options.revision, wanted, _HUB_OLD_WEIGHTS)


def located_adapter(source: str) -> Path:
    """Return an adapter's folder, downloaded from the hub if it is not local."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    _check_hub_id("adapter", source, "adapter_config.json")
    return _downloaded(source, None, _HUB_FILES, _HUB_OLD_ADAPTERS)


def _check_hub_id(what: str, source: str, file: str) -> None:
    """Raise ExportError for a path, which cannot be an id on the hub."""
    is_path = source.startswith(("/", ".", "~")) or Path(source).is_absolute()
    if is_path or source.count("/") > 1:
        raise ExportError(
            f"no {what} at {source}: no such folder; give a folder with {file} or a hub id"
        )


def _downloaded(
    source: str, revision: str | None, wanted: list[str], old_weights: list[str]
) -> Path:
    """Return the folder of a hub id's files; old weights only if there are no others."""
    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(source, revision=revision, allow_patterns=old_weights)
    except Exception as error:
        raise ExportError(
            f"{source} is no local folder and cannot be downloaded from the hub: "
            f"{reason_of(error)}; check the name and the network, or give a folder"
        ) from error
    return folder
