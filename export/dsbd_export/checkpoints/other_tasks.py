"""Models that do not write text, recognized by the configs and weights of their checkpoints.

A classifier, a reward model or an embedding model has the layers of a language model. If it lacks
only a head for text, or that head would be the embedding (tied), transformers loads it as a
language model and omits the head for its task. It would then be exported without a warning.
"""

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
)

from dsbd_export.checkpoints.checkpoint_files import open_weights
from dsbd_export.checkpoints.gguf_file import GgufHeader

_KINDS = (  # ends of class names, and the kind of model that they mean
    (r"Reward\w*|ForScore", "a reward model"),
    (r"ForToken\w*Classification", "a token classifier"),
    (r"Classification|ForRegression|ForDecision|Re-?rank\w*|Rank(?:er|ing)\w*", "a classifier"),
    (r"QuestionAnswering\w*", "a model that marks the answer in a text"),
    (r"MaskedLM", "a masked language model"),
    (r"EncoderModel|Embed\w*|Bidirectional\w*|Retriev\w*", "an embedding model"),
    (
        r"ForMultipleChoice|ForNextSentencePrediction|ForPreTraining|ForCTC",
        "a model for another task",
    ),
)
_HEAD = re.compile(
    r"(?:^|\.)((?:score|classifier|classification_head|cls|qa_outputs|reward_head|reward_model_head"
    r"|value_head|rm_head|regression_head|regression_layer|embedding_head)\..*)"
)
_POOLINGS = ("none", "mean", "cls", "last", "rank")  # llama.cpp's kinds of pooling, by number
_WRITES_NONE = "it writes no text"


def refusal_of_task(config: PreTrainedConfig, folder: Path) -> str | None:
    """Return why a checkpoint is not a model that writes text, by its config and files, or None."""
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    kinds = [_kind_of(name) for name in names]
    if names and all(kinds):
        return f"config.json names {names[0]}, {kinds[0]}: {_WRITES_NONE}"
    if _is_encoder(config):
        return (
            f"it is an encoder ({type(config).__name__} with is_decoder false), whose tokens see "
            f"those after them: {_WRITES_NONE}"
        )
    if (file := folder / "modules.json").is_file() and "Pooling" in _text_of(file):
        return f"it is an embedding model of sentence-transformers ({file.name}): {_WRITES_NONE}"
    if names and all(_is_base(name, config, folder) for name in names):
        return (
            f"config.json names {names[0]}, and the weights have no head for text, as those of "
            "embedding models; if it is a language model whose head is its embedding, name "
            f'"{MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__}" in "architectures"'
        )
    return None


def refusal_of_head(unexpected: Iterable[str]) -> str | None:
    """Return why weights that a language model lacks belong to another head, or None."""
    heads = sorted(name for name in unexpected if _HEAD.search(name))
    if not heads:
        return None
    return (
        f"has {heads[0]}, the head of a classifier, reward model or the like, and no head for "
        f"text: {_WRITES_NONE}; choose another checkpoint"
    )


def refusal_of_gguf_task(header: GgufHeader) -> str | None:
    """Return why a GGUF file is not a model that writes text, None if it may be one."""
    if pooling := header.of_architecture("pooling_type"):
        is_named = isinstance(pooling, int) and pooling < len(_POOLINGS)
        name = _POOLINGS[pooling] if is_named else pooling
        kind = "a classifier" if name == "rank" else "an embedding model"
        return f"it is {kind} (pooling_type {name}): {_WRITES_NONE}"
    if header.of_architecture("attention.causal") is False:
        return f"it is an encoder (attention.causal is false): {_WRITES_NONE}"
    return None


def _kind_of(name: str) -> str | None:
    return next((kind for ends, kind in _KINDS if re.search(rf"(?:{ends})$", name)), None)


def _is_encoder(config: PreTrainedConfig) -> bool:
    both = (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_MASKED_LM_MAPPING
    )
    return both and not config.is_encoder_decoder and getattr(config, "is_decoder", None) is False


def _is_base(name: str, config: PreTrainedConfig, folder: Path) -> bool:
    """Return whether ``name`` is the decoder class without a head, and the weights have none."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    base = MODEL_MAPPING.get(type(config), None)
    if model is None or config.is_encoder_decoder or name != getattr(base, "__name__", None):
        return False
    weights: list[str] = []
    with contextlib.suppress(Exception), open_weights(folder) as readers:
        weights = list(readers)  # errors are reported when the weights are loaded
    of_whole = (f"{model.base_model_prefix}.", "lm_head.", "embed_out.")
    return bool(weights) and not any(each.startswith(of_whole) for each in weights)


def _text_of(file: Path) -> str:
    try:
        return json.dumps(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return ""
