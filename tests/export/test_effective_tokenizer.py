"""A bundle's tokenizer is the one that transformers loads; the checks of text that it is given."""

import json
import re
import shutil
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

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.gate.text_checks import QUESTIONS, write_text_checks
from dsbd_export.pipeline import export_bundle
from dsbd_export.tokenizers.tokenizer_gate import TokenizerGate
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.export.conftest import SIZES, edit_json, opened, write_merges, written_tokenizer
from tests.native.text_command import written as command_tokenizer
from tests.tokenizer_corpus import CHATS, CORPUS, TOOL, random_texts, write_tokenizer


@dataclass(frozen=True)
class Written:
    wanted: PreTrainedTokenizerBase  # as transformers loads the checkpoint
    ours: Tokenizer  # as the runtime reads the written files
    folder: Path
    lines: list[str]  # reported


def loaded(folder: Path) -> PreTrainedTokenizerBase:
    with quiet_libraries():
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def written(source: Path, folder: Path) -> Written:
    ours, lines = written_tokenizer(opened(source), folder)
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
    write_tokenizer(name, folder)
    edit_json(folder / "tokenizer_config.json", **changes)
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
    write_merges(folder, model["merges"])
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


OWN_CODE = {
    "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    "tokenizer_class": "OwnTokenizer",
}
REFUSED = [  # (kind, changes of tokenizer_config.json, words)
    (
        "named_tokens",
        {"tokenizer_class": "GemmaTokenizer"},
        r"\(GemmaTokenizer\) refuses the text .*<unk>",
    ),
    (
        "llama_3",
        {"split_special_tokens": True},
        r"tokenizer of the target at .* cannot be exported: .*",
    ),
    ("named_tokens", OWN_CODE, r"cannot load the tokenizer .*with trust_remote_code"),
    *(
        (
            "deepseek",
            {"chat_template": [{"name": name, "template": "x"}]},
            r"has a chat template named .* is not a file name",
        )
        for name in ("../up", "a/b", "..", "")
    ),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_what_cannot_be_exported_is_refused(name, settings, words, tmp_path):
    source = edited(name, tmp_path / "checkpoint", **settings)
    with pytest.raises(ExportError, match=words):
        written(source, tmp_path / "bundle")


def test_python_code_without_a_fast_form_is_refused(tmp_path):
    source = edited("gpt_2", tmp_path / "checkpoint", tokenizer_class="CTRLTokenizer")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    write_merges(source, [])
    with pytest.raises(ExportError, match=r"target at .* is a CTRLTokenizer, which is Python code"):
        written(source, tmp_path / "bundle")


WARNINGS = [  # (kind, changes of tokenizer_config.json, of config.json, words)
    ("named_tokens", {}, {"vocab_size": 603}, "2 tokens .* vocab_size 603, the first is '<image>'"),
    ("llama_3", {}, {"eos_token_id": 601}, r"'<\|eot_id\|>' \(604\), ends no answer: .*\[601\]"),
    ("word_piece", {"do_lower_case": False}, {}, "as BertTokenizer, which splits 'Hello, world!'"),
]


@pytest.mark.parametrize(("name", "settings", "config", "words"), WARNINGS)
def test_warnings(tmp_path, name, settings, config, words):
    source = edited(name, tmp_path / "checkpoint", **settings)
    edit_json(source / "config.json", **config)
    lines = written(source, tmp_path / "bundle").lines
    assert any(line.startswith("warning: ") for line in lines)
    assert len([line for line in lines if re.search(words, line)]) == 1


ALL = "{% for m in messages %}{{ m.content }};{% endfor %}"
NAMED = {
    "default": "{{ bos_token }}D" + ALL,
    "tool_use": "{{ bos_token }}T{{ tools | tojson }}" + ALL,
}


def as_list(folder: Path) -> Path:
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


def other_decoder(source: Path, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"]["decoders"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))


GATE = [
    (
        lambda source, folder: shutil.copy(source / "tokenizer.json", folder),
        r"\(TokenizersBackend\) cannot be exported: by its files it reads '.*' as",
    ),
    (
        lambda _, folder: (folder / "tokenizer_config.json").write_text("{}"),
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


DATED = '{{ strftime_now("%d %b %Y") }}{% for m in messages %}{{ m.content }}{% endfor %}'


def checks_in(folder):
    write_text_checks(folder, None)
    text = (folder / "text_checks.json").read_text(encoding="utf-8")
    return json.loads(text), len(text)


def test_answers_are_those_of_the_runtime(tmp_path):
    folder = command_tokenizer("llama_3", tmp_path)
    (folder / "chat_template.jinja").write_text(DATED)
    checks, size = checks_in(folder)
    assert tuple(checks) == QUESTIONS and size < 200_000
    tokenizer = Tokenizer(folder, bos_token_id=None)
    for request, ids in checks["encodes"]:
        found = tokenizer.encode(request["encode"], add_special_tokens=request["special"])
        assert found == ids
    whole = [(each["decode"], text) for each, text in checks["decodes"] if "decode" in each]
    assert [tokenizer.decode(ids) for ids, _ in whole] == [text for _, text in whole]
    after = {tuple(ids): text for ids, text in whole}
    for request, pieces in checks["decodes"]:
        if "stream" in request:
            assert after[tuple(request["stream"])].endswith("".join(pieces))
    assert len(checks["encodes"]) > 200 and len(whole) > 100
    assert {text[:11] for _, text in checks["renders"]} == {"09 Jan 2025"}


def test_what_the_runtime_refuses_has_no_answer(tmp_path):
    """A decoder that strips more characters than a token has panics."""
    content = json.loads((command_tokenizer("llama_2", tmp_path) / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    checks, _ = checks_in(tmp_path)
    assert None in [answer for _, answer in checks["decodes"]]
    assert None not in [answer for _, answer in checks["encodes"]]


def test_many_special_tokens_are_not_all_asked(tmp_path):
    content = json.loads((command_tokenizer("llama_2", tmp_path) / "tokenizer.json").read_text())
    first = max(content["model"]["vocab"].values()) + 1000
    content["added_tokens"] += [
        {"id": first + i, "content": f"<unused{i}>", "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False} for i in range(6000)
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert checks_in(tmp_path)[1] < 300_000
