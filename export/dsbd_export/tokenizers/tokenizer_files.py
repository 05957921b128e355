"""Tokenizer of a checkpoint as transformers loads it, in files that need no transformers.

A checkpoint's tokenizer.json may be incomplete. transformers adds the tokens of
tokenizer_config.json (``added_tokens_decoder``, ``additional_special_tokens``,
``extra_special_tokens``, ``eos_token`` and the like), added_tokens.json and
special_tokens_map.json. Some tokenizer classes also replace the normalizer, the splitting into
words, the decoder and the tokens around a prompt. The resulting tokenizer is written. The runtime
then reads it and must produce the same ids, texts and chats.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from transformers import GenerationConfig, PreTrainedTokenizerBase

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import json_object
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.progress import Report
from dsbd_export.tokenizers.gguf_tokenizer import (
    gguf_ends_line,
    gguf_tokenizer,
    gguf_tokenizer_warning,
)
from dsbd_export.tokenizers.older_tokenizers import (
    OLDER_FILES,
    has_older_files,
    is_marian,
    is_tekken,
    load_folder,
    target_tokenizer,
    tiktoken_file,
    write_source_tokenizer,
)
from dsbd_export.tokenizers.tokenizer_gate import ENGLISH, PLAIN_TEXTS, TokenizerGate, reads_little
from dsbd_runtime.bundle_files.bundle import (
    ADDITIONAL_TEMPLATES_FOLDER,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)

_PLAIN = "Hello, world! It's 3.14159 and\n    def read(path): return [path]"
_TEMPLATE_NAME = re.compile(r"[\w.-]*\w[\w.-]*")
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def tokenizer_json(checkpoint: Checkpoint) -> str:
    """Return the text of tokenizer.json that ``write_tokenizer_files`` would write."""
    texts, place = checkpoint.tokenizer_texts, checkpoint.tokenizer_folder
    if place not in texts:
        texts[place] = _backend(load_tokenizer(checkpoint)).to_str()
    return texts[place]


def read_tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of ``tokenizer_json``."""
    content: dict[str, Any] = json.loads(tokenizer_json(checkpoint))
    return content


def id_by_token(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return ids by token; the vocabulary of Unigram is a list of (token, score) in the file."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        return vocabulary
    return {entry[0]: index for index, entry in enumerate(vocabulary)}


def highest_token_id(tokenizer: dict[str, Any]) -> int:
    """Return the highest id of a token, added tokens included; -1 without tokens."""
    added = (token["id"] for token in tokenizer.get("added_tokens", []))
    return max([*id_by_token(tokenizer).values(), *added], default=-1)


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path, report: Report) -> None:
    """Write a tokenizer's files; raise ExportError if they behave differently in transformers."""
    tokenizer = load_tokenizer(checkpoint)
    backend = _backend(tokenizer)
    if checkpoint.encoder is not None and checkpoint.encoder.speech is not None:
        added = backend.get_added_tokens_decoder()
        times = [added[id_] for id_ in sorted(added) if checkpoint.encoder.speech.is_time(id_)]
        # as special tokens, because transformers omits times from texts
        backend.add_special_tokens([AddedToken(each.content, normalized=False) for each in times])
    backend.save(str(folder / TOKENIZER_FILE))
    text = json.dumps(_config(tokenizer), ensure_ascii=False, indent=2)
    (folder / TOKENIZER_CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
    templates = _templates(checkpoint, tokenizer)
    for name, template in templates.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8", newline="")
    generation_file = checkpoint.folder / GENERATION_CONFIG_FILE
    if checkpoint.gguf_file is None and generation_file.is_file():
        shutil.copyfile(generation_file, folder / GENERATION_CONFIG_FILE)
    elif checkpoint.encoder is not None:  # older ones have num_beams etc. in config.json
        config = json_object(checkpoint.folder / "config.json")
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    if checkpoint.gguf_file and (
        line := gguf_ends_line(checkpoint.source, checkpoint.eos_token_ids)
    ):
        report(f"{checkpoint.role}: {line}")
    marian, encoder = checkpoint.tokenizer_folder, checkpoint.encoder
    if encoder is not None and is_marian(marian):
        with quiet_libraries():
            write_source_tokenizer(marian, folder, encoder.vocab_size, PLAIN_TEXTS)
    with quiet_libraries():
        gate = TokenizerGate(tokenizer, checkpoint, folder)
        gate.check_ids()
        gate.check_chats(templates)
        for warning in _warnings(checkpoint, tokenizer):
            report(f"warning: {warning}")


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer as transformers loads it; raise ExportError if it cannot."""
    folder, role = checkpoint.tokenizer_folder, checkpoint.role
    file = folder / TOKENIZER_FILE
    if checkpoint.tokenizer_gguf is not None:
        return _of_gguf(checkpoint)  # files next to the GGUF file are ignored
    elif file.is_file():
        tokenizer_content(file)
    elif is_marian(folder):
        with quiet_libraries():
            return target_tokenizer(folder)
    elif (tiktoken := tiktoken_file(folder)) is not None:
        raise ExportError(
            f"the tokenizer of the {role} is {tiktoken}, a tiktoken file, which has neither the "
            f"splitting into words nor the special tokens; a {TOKENIZER_FILE} is needed, "
            "such as that of a converted copy of the model"
        )
    elif not has_older_files(folder):
        # without any file transformers would make an empty tokenizer
        raise ExportError(
            f"the {role} has no {file} and none of {', '.join(OLDER_FILES)} to build it from; "
            "copy the tokenizer of its base model"
        )
    try:
        with quiet_libraries():
            tokenizer = load_folder(
                folder, trust_remote_code=checkpoint.trust_remote_code, local_files_only=True
            )
    except Exception as error:
        raise ExportError(
            f"transformers cannot load the tokenizer of the {role} at {folder}: "
            f"{reason_of(error)}; check its files and the tokenizer_class that "
            f"{TOKENIZER_CONFIG_FILE} names, or copy those of its base model, and allow its own "
            "code with trust_remote_code if it has some that you trust"
        ) from error
    if not tokenizer.is_fast:
        raise ExportError(
            f"the tokenizer of the {role} at {folder} is a {type(tokenizer).__name__}, which is "
            f"Python code without a form as {TOKENIZER_FILE}; a fast tokenizer is needed, such as "
            "that of a converted copy of the model"
        )
    return tokenizer


def _of_gguf(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    try:
        with quiet_libraries():
            return gguf_tokenizer(checkpoint.source)
    except ExportError:
        raise
    except Exception as error:  # metadata of wrong types
        raise ExportError(
            f"the tokenizer of {checkpoint.source} cannot be read: {reason_of(error)}; download "
            "the file again, or convert the model again"
        ) from error


def tokenizer_content(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json; raise ExportError unless it is one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file} is invalid JSON ({error}); copy or create it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ExportError(f"{file} has no section 'model'; copy or create it again")
    return content


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of transformers' tokenizer, without truncation and padding."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    # Some tokenizers remove spaces before punctuation from decoded text.
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    cleans_up = bool(tokenizer.clean_up_tokenization_spaces)
    if cleans_up and (not is_bpe or getattr(tokenizer, forced, False)):
        decoder_steps = [] if backend.decoder is None else [backend.decoder]
        steps = [decoders.Replace(text, text.strip(" ")) for text in _CLEANED]
        backend.decoder = decoders.Sequence([*decoder_steps, decoders.Fuse(), *steps])
    return backend


def _config(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return tokenizer_config.json, with special tokens by their names in templates."""
    standard = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    tokens = tokenizer.special_tokens_map
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[name] for name in standard if name in tokens},
        "extra_special_tokens": {n: text for n, text in tokens.items() if n not in standard},
    }


def _templates(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    chat_template = tokenizer.chat_template
    by_name = (
        chat_template
        if isinstance(chat_template, dict)
        else {}
        if chat_template is None
        else {"default": chat_template}
    )
    for name in by_name:
        if not _TEMPLATE_NAME.fullmatch(name):
            raise ExportError(
                f"the {checkpoint.role} at {checkpoint.folder} has a chat template named {name!r}, "
                "which is not a file name; use letters, digits, '_', '-' and '.'"
            )
    return {
        CHAT_TEMPLATE_FILE
        if name == "default"
        else f"{ADDITIONAL_TEMPLATES_FOLDER}/{name}.jinja": template
        for name, template in by_name.items()
    }


def _warnings(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    role, folder = checkpoint.role, checkpoint.tokenizer_folder
    size = checkpoint.vocab_size
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= size}
    if beyond:
        token = min(beyond, key=beyond.__getitem__)
        yield (
            f"{len(beyond)} tokens of the {role}'s tokenizer are beyond its vocab_size {size}, the "
            f"first is {token!r} ({beyond[token]}); prompts with them are refused"
        )
    eos = tokenizer.eos_token_id
    if eos is not None and eos < size and eos not in checkpoint.eos_token_ids:
        yield (
            f"the eos_token of the {role}'s tokenizer, {tokenizer.eos_token!r} ({eos}), ends no "
            f"answer: eos_token_id of its config is {checkpoint.eos_token_ids}; if answers run "
            f"on, add {eos} to it in {GENERATION_CONFIG_FILE} and export again"
        )
    decoded = tokenizer.decode(tokenizer.encode(ENGLISH), skip_special_tokens=True)
    if reads_little(ENGLISH, decoded):
        yield (
            f"the {role}'s tokenizer reads English as {decoded.strip()!r}: its tokens are another "
            "alphabet, so the export compares random tokens instead of a text"
        )
    if checkpoint.tokenizer_gguf is not None:
        if warning := gguf_tokenizer_warning(checkpoint.source):
            yield warning
        return
    if is_tekken(folder) and tokenizer.chat_template is None:
        yield (
            f"the {role} at {folder} has a tekken.json, which has no chat template, and the bundle "
            f"will have none; for chats add one next to it as {CHAT_TEMPLATE_FILE} and export again"
        )
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    as_written = Tokenizer.from_file(str(file)).encode(_PLAIN, add_special_tokens=False).tokens
    loaded = tokenizer.tokenize(_PLAIN)
    if as_written != loaded:
        yield (
            f"transformers loads the {role}'s tokenizer as {type(tokenizer).__name__}, which "
            f"splits {_PLAIN[:13]!r}... into {loaded[:4]}..., {TOKENIZER_FILE} alone into "
            f"{as_written[:4]}...; the bundle does as transformers. If that is wrong, set "
            f'"tokenizer_class": "PreTrainedTokenizerFast" in {file.parent / TOKENIZER_CONFIG_FILE}'
        )
