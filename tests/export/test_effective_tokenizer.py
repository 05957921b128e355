"""A bundle's tokenizer is the one that transformers loads: ids, texts and chats are the same."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_bundle
from dsbd_export.tokenizers.tokenizer_files import write_tokenizer_files
from dsbd_export.tokenizers.tokenizer_gate import TokenizerGate
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.export.conftest import SIZES
from tests.tokenizer_corpus import CHATS, CORPUS, TOOL, random_texts, write_tokenizer


@dataclass(frozen=True)
class Written:
    """Attributes:
    wanted: as transformers loads the checkpoint.
    ours: as the runtime reads what was written.
    folder: of what was written.
    lines: what was reported.
    """

    wanted: PreTrainedTokenizerBase
    ours: Tokenizer
    folder: Path
    lines: list[str]


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint("target", folder, ExportConfig(target="", output=Path("out")))


def loaded(folder: Path) -> PreTrainedTokenizerBase:
    with quiet_libraries():
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )
    return found


def written(source: Path, folder: Path) -> Written:
    checkpoint, lines = opened(source), []
    folder.mkdir()
    write_tokenizer_files(checkpoint, folder, lines.append)
    ours = Tokenizer(folder, bos_token_id=checkpoint.bos_token_id)
    return Written(loaded(source), ours, folder, lines)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    made: dict[str, Written] = {}

    def of(name: str) -> Written:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source = write_tokenizer(name, folder / "checkpoint")
            made[name] = written(source, folder / "bundle")
        return made[name]

    return of


NUMBERS = [pytest.param(60), pytest.param(500, marks=pytest.mark.long)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", CORPUS)
def test_ids_and_texts(corpus, name, number):
    kind = corpus(name)
    tokens = list(kind.wanted.get_added_vocab())
    assert set(CORPUS[name].own_tokens) <= set(tokens)
    with quiet_libraries():
        for text in random_texts(number, seed=number, tokens=tokens):
            wanted = kind.wanted.encode(text)
            assert kind.ours.encode(text) == wanted
            plain = kind.wanted.encode(text, add_special_tokens=False)
            assert kind.ours.encode(text, add_special_tokens=False) == plain
            assert kind.ours.decode(wanted) == kind.wanted.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "name", [name for name in CORPUS if "chat_template" in CORPUS[name].config]
)
def test_chats(corpus, name, tools):
    kind = corpus(name)
    template = ChatTemplate.from_folder(kind.folder)
    for chat in CHATS:
        options = {"tools": tools, "add_generation_prompt": True}
        wanted = kind.wanted.apply_chat_template(list(chat), tokenize=False, **options)
        text = template.render(chat, variables={"tools": tools})
        assert text == wanted
        ids = kind.wanted.apply_chat_template(list(chat), return_dict=False, **options)
        assert kind.ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_written_is_complete(corpus, name, tmp_path):
    """transformers loads the bundle's own files as the same tokenizer, and so does the export."""
    kind = corpus(name)
    again = PreTrainedTokenizerFast.from_pretrained(kind.folder)
    for text in random_texts(20, tokens=list(kind.wanted.get_added_vocab())):
        assert again.encode(text) == kind.wanted.encode(text)
    assert again.special_tokens_map == kind.wanted.special_tokens_map
    # The configs here have their family's ids, which end other tokenizers' answers.
    assert [line for line in kind.lines if "ends no answer" not in line] == []


def edited(name: str, folder: Path, **changes: Any) -> Path:
    """Write a kind of the corpus with changes of tokenizer_config.json."""
    write_tokenizer(name, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def with_config(folder: Path) -> Path:
    return edited("named_tokens", folder, add_bos_token=True, add_eos_token=True)


def from_older_files(folder: Path) -> Path:
    """vocab.json and merges.txt alone, where transformers does what the config says."""
    edited("gpt_2", folder, add_bos_token=True, add_eos_token=True)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return folder


ADDED_ENDS = [(with_config, 0), (from_older_files, 1)]  # (checkpoint, tokens put at each end)


@pytest.mark.parametrize(("write", "number"), ADDED_ENDS)
def test_add_bos_token_is_as_in_transformers(write, number, tmp_path):
    kind = written(write(tmp_path / "checkpoint"), tmp_path / "bundle")
    plain = kind.wanted.encode("Hello", add_special_tokens=False)
    ends = [600] * number
    assert kind.ours.encode("Hello") == kind.wanted.encode("Hello") == [*ends, *plain, *ends]


def test_truncation_and_padding_are_not_written(tmp_path):
    source = write_tokenizer("llama_3", tmp_path / "checkpoint")
    backend = Backend.from_file(str(source / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(source / "tokenizer.json"))
    written(source, tmp_path / "bundle")
    content = json.loads((tmp_path / "bundle" / "tokenizer.json").read_text())
    assert (content["truncation"], content["padding"]) == (None, None)


def test_spaces_are_cleaned_up_where_transformers_does(tmp_path):
    source = edited("word_piece", tmp_path / "checkpoint", clean_up_tokenization_spaces=True)
    kind = written(source, tmp_path / "bundle")
    ids = kind.ours.encode("it 's fine , isn n't it ? yes !")
    assert kind.ours.decode(ids) == kind.wanted.decode(ids, skip_special_tokens=True)
    assert kind.ours.decode(ids).endswith("it? yes!")


def test_a_class_that_cannot_read_the_files_is_refused(tmp_path):
    source = edited("named_tokens", tmp_path / "checkpoint", tokenizer_class="GemmaTokenizer")
    with pytest.raises(ExportError, match=r"\(GemmaTokenizer\) refuses the text .*<unk>"):
        written(source, tmp_path / "bundle")


def test_what_files_cannot_say_is_refused(tmp_path):
    source = edited("llama_3", tmp_path / "checkpoint", split_special_tokens=True)
    with pytest.raises(ExportError, match=r"tokenizer of the target at .* cannot be exported: .*"):
        written(source, tmp_path / "bundle")


def test_python_code_without_a_fast_form_is_refused(tmp_path):
    source = edited("gpt_2", tmp_path / "checkpoint", tokenizer_class="CTRLTokenizer")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    (source / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ExportError, match=r"target at .* is a CTRLTokenizer, which is Python code"):
        written(source, tmp_path / "bundle")


def test_own_code_that_was_not_allowed_is_refused(tmp_path):
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    source = edited(
        "named_tokens",
        tmp_path / "checkpoint",
        auto_map=auto_map,
        tokenizer_class="OwnTokenizer",
    )
    with pytest.raises(ExportError, match=r"cannot load the tokenizer .*with trust_remote_code"):
        written(source, tmp_path / "bundle")


WARNINGS = [  # (kind, changes of tokenizer_config.json, of config.json, words)
    ("named_tokens", {}, {"vocab_size": 603}, "2 tokens .* vocab_size 603, the first is '<image>'"),
    ("llama_3", {}, {"eos_token_id": 601}, r"'<\|eot_id\|>' \(604\), ends no answer: .*\[601\]"),
    ("word_piece", {"do_lower_case": False}, {}, "as BertTokenizer, which splits 'Hello, world!'"),
]


@pytest.mark.parametrize(("name", "settings", "config", "words"), WARNINGS)
def test_warnings(tmp_path, name, settings, config, words):
    source = edited(name, tmp_path / "checkpoint", **settings)
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    lines = written(source, tmp_path / "bundle").lines
    assert any(line.startswith("warning: ") for line in lines)
    assert len([line for line in lines if re.search(words, line)]) == 1


ALL = "{% for m in messages %}{{ m.content }};{% endfor %}"
NAMED = {
    "default": "{{ bos_token }}D" + ALL,
    "tool_use": "{{ bos_token }}T{{ tools | tojson }}" + ALL,
}


def as_list(folder: Path) -> Path:
    """Named templates in tokenizer_config.json."""
    named = [{"name": name, "template": text} for name, text in NAMED.items()]
    return edited("deepseek", folder, chat_template=named)


def as_files(folder: Path) -> Path:
    """Named templates as files, which come before those of tokenizer_config.json."""
    write_tokenizer("deepseek", folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    return folder


@pytest.mark.parametrize("write", [as_list, as_files])
def test_named_templates_are_copied(write, tmp_path):
    folder = written(write(tmp_path / "checkpoint"), tmp_path / "bundle").folder
    assert (folder / "chat_template.jinja").read_text() == NAMED["default"]
    copied = folder / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == NAMED["tool_use"]


@pytest.mark.parametrize("name", ["../up", "a/b", "..", ""])
def test_a_template_whose_name_is_no_file_is_refused(name, tmp_path):
    named = [{"name": name, "template": "x"}]
    source = edited("deepseek", tmp_path / "checkpoint", chat_template=named)
    with pytest.raises(ExportError, match=r"has a chat template named .* is not a file name"):
        written(source, tmp_path / "bundle")


def raw_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json as it is in the checkpoint, as bundles once had it."""
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())


def no_bos_token(source: Path, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")


def other_decoder(source: Path, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"]["decoders"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))


GATE = [
    (raw_tokenizer, r"\(TokenizersBackend\) cannot be exported: by its files it reads '.*' as"),
    (
        no_bos_token,
        r"a question with chat_template\.jinja, which is refused here: .*'bos_token' is undefined",
    ),
    (other_decoder, r"it writes \[1, .*\] as '  ', in transformers as ' '"),
]


@pytest.mark.parametrize(("change", "words"), GATE)
def test_the_gate(tmp_path, change, words):
    source = write_tokenizer("mistral", tmp_path / "checkpoint")
    kind = written(source, tmp_path / "bundle")
    change(source, kind.folder)
    gate = TokenizerGate(kind.wanted, opened(source), kind.folder)
    with pytest.raises(ExportError, match=words):
        gate.check_ids()
        gate.check_chats({"chat_template.jinja": CORPUS["mistral"].config["chat_template"]})


def test_an_exported_bundle(tmp_path):
    """From a checkpoint with named templates to the ids of a chat, by the bundle alone."""
    source = as_list(tmp_path / "checkpoint")
    (source / "config.json").unlink()
    config = LlamaConfig(**SIZES | {"vocab_size": 603}, num_hidden_layers=1)
    with quiet_libraries():
        AutoModelForCausalLM.from_config(config).save_pretrained(source)
    lines: list[str] = []
    output = tmp_path / "bundle"
    export_bundle(ExportConfig(target=str(source), output=output), report=lines.append)
    bundle = open_bundle(output, verify=True)
    assert {"tokenizer_config.json", "additional_chat_templates/tool_use.jinja"} <= set(
        bundle.manifest.files
    )
    ours, wanted = Tokenizer.from_bundle(bundle), loaded(source)
    text = f"Hello {CORPUS['deepseek'].own_tokens[0]}"
    assert ours.encode(text) == wanted.encode(text)
    shown = ChatTemplate.from_folder(output).render(CHATS[0])
    asked = {"tokenize": False, "add_generation_prompt": True}
    assert shown == wanted.apply_chat_template(list(CHATS[0]), **asked)
    assert shown.startswith(f"{wanted.bos_token}D")
    assert [line for line in lines if "ends no answer" in line]
