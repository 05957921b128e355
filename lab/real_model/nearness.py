"""Divergence of llama.cpp with a GGUF file from the checkpoint, in the parity gate's measures."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.gate.parity import Divergence, divergence
from dsbd_export.opening import open_checkpoint
from dsbd_export.parity_cases import reference_logits, text_case
from lab.peers.prepare import environment_python

RUNNER = Path(__file__).with_name("llama_cpp_rows.py")


def write_reference(checkpoint: str, file: str) -> None:
    """Write the gate's token_ids (N,) and rows (R,), and transformers' logits (R, V)."""
    opened = open_checkpoint("target", Path(checkpoint), ModelOptions())
    case = text_case(opened)
    logits = reference_logits(load_model(opened), case)
    np.savez(file, token_ids=case.node_ids, rows=case.rows, logits=logits)


def divergence_of(
    gguf: Path, reference: Path, python: Path, threads: int, num_rows: int
) -> Divergence:
    """Return the divergence of a GGUF file from ``reference``, on evenly spaced rows.

    reference: file of ``write_reference``. python: interpreter that has xllamacpp.
    """
    expected = np.load(reference)
    chosen = np.linspace(0, len(expected["rows"]) - 1, num_rows).astype(np.int64)
    request = {
        "model": str(gguf),
        "threads": threads,
        "prompts": [expected["token_ids"][: row + 1].tolist() for row in expected["rows"][chosen]],
        "vocab_size": expected["logits"].shape[1],
        "output": str(reference.with_name(f"{gguf.stem}.rows")),
    }
    command = (str(python), str(RUNNER))
    subprocess.run(command, input=json.dumps(request), text=True, check=True, stdout=sys.stderr)
    logprobs = np.fromfile(request["output"], np.float32).reshape(num_rows, -1)
    return divergence(logprobs, expected["logits"][chosen])


def llama_cpp_python(work: Path, installs: tuple[tuple[str, ...], ...]) -> Path:
    """Return the Python of llama.cpp's environment, which the stage speed also uses."""
    return environment_python(work / "llama.cpp" / "venv", installs)
