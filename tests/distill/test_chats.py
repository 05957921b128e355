"""Chats of a distillation: prompts, held-out ones, refusals, and a draft distilled from them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_model import FeatureShape, new_feature_draft
from dsbd_export.chats import Chat, ChatTokens, Prompts
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_export.texts import find_files, is_held_out, open_streams, write_streams
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from dsbd_runtime.text.tokenizer import Tokenizer
from tests.distill.conftest import (
    assert_same_ids,
    assert_same_weights,
    distilled_once,
    interrupted,
    run,
)
from tests.runtime.tiny_tokenizer import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
USER, ANSWER = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"))
)


def chat_line(*messages):
    return json.dumps({"messages": list(messages)})


def write_chats(folder, num_chats=100):
    folder.mkdir(exist_ok=True)
    lines = []
    for i in range(num_chats):
        question = {"role": "user", "content": f"{i} + {i % 7}"}
        lines.append(chat_line(question, *([ANSWER, USER] if i % 3 == 0 else [])))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def chat_target(target, tmp_path_factory):
    folder = shutil.copytree(target, tmp_path_factory.mktemp("chat") / "TARGET")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def tokens_of(tmp_path):
    """Returns the streams of lines, with a tokenizer of one token a byte."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(folder, bos_token_id=None)

    def tokens(lines, longest=100, learns_answers=False):
        (tmp_path / "chats.jsonl").write_text("\n".join(lines))
        chats = ChatTokens(folder, tokenizer, longest=longest, learns_answers=learns_answers)
        files = find_files((str(tmp_path / "chats.jsonl"),), ())
        shutil.rmtree(tmp_path / "tokens", ignore_errors=True)
        write_streams(files, tokenizer, chats, None, tmp_path / "tokens")
        return tokenizer, open_streams(tmp_path / "tokens"), chats

    return tokens


TURNS = [  # (messages, lengths of the prompts in them)
    ([USER], [1]),
    ([USER, ANSWER], [1]),
    ([USER, ANSWER, USER], [1, 3]),
    ([USER, ANSWER, USER, ANSWER], [1, 3]),
    ([ANSWER, USER], [2]),
]


def test_every_turn_that_the_model_answers_is_a_prompt():
    for messages, lengths in TURNS:
        assert [len(prompt) for prompt in Chat(messages, "x").prompts()] == lengths


def test_prompts_are_rendered_as_requests_are_and_held_out_by_name(tokens_of):
    lines = [chat_line({"role": "user", "content": f"q{i}"}, ANSWER) for i in range(120)]
    tokenizer, streams, _ = tokens_of(lines)
    names = [f"chats.jsonl:{number}" for number in range(1, 121)]
    for prompts, held_out in ((streams.train_prompts, False), (streams.held_out_prompts, True)):
        found = [tokenizer.decode(ids.tolist()) for ids in prompts.at(range(len(prompts)))]
        wanted = [f"<u>q{i}\n<a>" for i, name in enumerate(names) if is_held_out(name) == held_out]
        assert found == wanted and len(wanted) >= 4
    assert not streams.has_texts and streams.has_chats
    assert len(streams.train) == len(streams.held_out) == 0


def test_given_answers_are_texts_where_they_are_asked_for(tokens_of):
    lines = [chat_line(USER, {**ANSWER, "content": "A" * 150})] * 40 + [chat_line(USER)]
    tokenizer, streams, _ = tokens_of(lines, learns_answers=True)
    text = tokenizer.decode([*streams.train, *streams.held_out])
    assert text.count("<u>Q\n<a>" + "A" * 150 + "\n") == 40 and text.count("<u>") == 40
    assert streams.has_texts and len(streams.train_prompts) + len(streams.held_out_prompts) == 41


def test_long_prompts_are_counted_and_left_out(tokens_of):
    lines = [chat_line({"role": "user", "content": "x" * (5 * i)}) for i in range(1, 41)]
    _, streams, chats = tokens_of(lines, longest=112)
    kept = len(streams.train_prompts) + len(streams.held_out_prompts)
    assert (kept, chats.num_left_out) == (21, 19)  # 7 more characters: at most 105


def test_few_chats_hold_their_end_out(tokens_of):
    lines = [chat_line({"role": "user", "content": f"q{i}"}) for i in range(30)]
    tokenizer, streams, _ = tokens_of(lines)
    last = streams.held_out_prompts
    assert "the end of all chats" in streams.split and len(last) == 4
    assert len(streams.train_prompts) == 26
    everything = [*streams.train_prompts.at(range(26)), *last.at(range(4))]
    found = {tokenizer.decode(ids.tolist()) for ids in everything}
    assert found == {f"<u>q{i}\n<a>" for i in range(30)}


REFUSED = [
    ('{"messages": []}', "chats.jsonl:1: messages is []"),
    ('{"messages": {"role": "user"}}', "chats.jsonl:1 has messages that are no list"),
    ('{"messages": [3]}', "chats.jsonl:1: messages[0] is 3"),
    ('{"messages": [], "text": "x"}', "chats.jsonl:1 has both a text and messages"),
    (chat_line(USER), "data has 1 prompts in chats, at least 20 are needed"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_chats_that_are_refused(tokens_of, line, words):
    with pytest.raises(ExportError, match=re.escape(words)):
        tokens_of([line])


def test_a_target_without_a_template_is_refused(target, tmp_path):
    data = write_chats(tmp_path / "chats")
    config = DistillConfig(target=str(target), data=(str(data),), output=tmp_path / "draft")
    with pytest.raises(ExportError, match=r"chats\.jsonl:1 is a chat, but .* no chat template"):
        run(config)


def test_prompts_without_their_end():
    prompts = Prompts(np.arange(6, dtype=np.uint32), np.array([1, 3, 6]))
    first, last = prompts.without_end(2)
    assert [ids.tolist() for ids in first.at(range(1))] == [[0]]
    assert [ids.tolist() for ids in last.at(range(2))] == [[1, 2], [3, 4, 5]]


@pytest.fixture(scope="session")
def of_chats(chat_target, tmp_path_factory):
    data = write_chats(tmp_path_factory.mktemp("data") / "chats")
    options = {"draft_vocab": 150, "coverage": 4, "steps": 30}
    return distilled_once(tmp_path_factory, "of_chats", chat_target, data, **options)


def test_a_draft_of_chats_is_better_than_before(of_chats):
    record = of_chats.record
    assert record.acceptance > record.curve[0].acceptance + 0.05
    assert (record.temperature, record.top_k, record.top_p) == (0.7, 32, 0.9)
    assert record.are_chats and record.num_train_tokens == 0 and record.num_train_prompts > 50
    assert 0.0 <= record.greedy_acceptance <= 1.0 and 0.0 < record.coverage <= 1.0
    assert read_record(of_chats.config.output / RECORD_FILE) == record
    assert any("prompts of chats to learn from" in line for line in of_chats.report)
    assert any("the draft proposes 150 of 300 tokens" in line for line in of_chats.report)


def test_a_draft_of_some_tokens_is_exported_as_it_was_trained(of_chats, chat_target, tmp_path):
    folder = of_chats.config.output
    proposed = json.loads((folder / "proposed_tokens.json").read_text())
    assert len(proposed) == 150 == of_chats.record.num_proposed_tokens and 1 in proposed
    assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape[0] == 300
    report = []
    config = ExportConfig(target=str(chat_target), draft=str(folder), output=tmp_path / "bundle")
    export_bundle(config, report=report.append)
    assert "draft: proposes 150 of 300 tokens, as it was trained" in report
    with Pipeline.from_bundle(tmp_path / "bundle") as pipeline:
        assert_same_ids(pipeline, "speculative", "sample", "1 + 1", max_new_tokens=12, seed=1)


REFUSED_EXPORTS = [
    ({"draft_vocab": 160}, "draft_vocab=160 has no meaning for the draft at"),
    ({"logits": "topk:151"}, "logits='topk:151' has more logits than the 150 tokens"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED_EXPORTS)
def test_options_against_the_training_are_refused(of_chats, chat_target, tmp_path, options, words):
    output = tmp_path / "bundle"
    config = ExportConfig(
        target=str(chat_target), draft=str(of_chats.config.output), output=output, **options
    )
    with pytest.raises(ExportError, match=re.escape(words)):
        export_bundle(config, report=silent)


@pytest.mark.parametrize("content", ["{", "[]", "[3, 2]", "[1, 1]", "[1, 300]", '["1"]', "{}"])
def test_a_damaged_list_of_tokens_is_named(of_chats, tmp_path, content):
    folder = shutil.copytree(of_chats.config.output, tmp_path / "draft")
    (folder / "proposed_tokens.json").write_text(content)
    with pytest.raises(ExportError, match=r"proposed_tokens\.json is not .*; copy it again"):
        open_checkpoint("draft", folder, ModelOptions())


def test_such_a_draft_is_no_target(of_chats):
    with pytest.raises(ExportError, match="was trained to propose 150 tokens only"):
        open_checkpoint("target", of_chats.config.output, ModelOptions())


def test_interrupted_a_training_on_chats_ends_the_same(of_chats, chat_target, tmp_path):
    """Interrupted after its last step, then gone on."""
    config = DistillConfig(**{**vars(of_chats.config), "output": tmp_path / "draft"})

    interrupted(config, "held-out acceptance")
    record, report = run(config)
    assert "going on from step 30" in report
    assert record.acceptance == of_chats.record.acceptance
    assert_same_weights(config.output, of_chats.config.output)


WRONG_VOCABULARIES = [
    ({"draft_vocab": 300}, "draft_vocab=300 leaves out none of 300 tokens"),
    ({"draft_vocab": 300, "target_layers": 1}, "draft_vocab=300 leaves out none of 300 tokens"),
    ({"draft_vocab": 300, "kind": "feature"}, "draft_vocab=300 leaves out none of 300 tokens"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_VOCABULARIES)
def test_draft_vocabularies_that_are_refused(options, words, chat_target, tmp_path):
    options = {"data": ("d",), "output": tmp_path / "draft", **options}
    config = DistillConfig(target=str(chat_target), **options)
    with pytest.raises(ExportError, match=words):
        run(config)


@pytest.fixture(scope="session")
def feature_of_chats(chat_target, tmp_path_factory):
    data = write_chats(tmp_path_factory.mktemp("data") / "chats")
    options = {"kind": "feature", "params": "60K", "draft_vocab": 150, "coverage": 4, "steps": 30}
    return distilled_once(tmp_path_factory, "feature_of_chats", chat_target, data, **options)


def test_a_feature_draft_of_chats_and_some_tokens(feature_of_chats, chat_target, tmp_path):
    """It learns at every depth, the export takes it, and requests have the target's tokens."""
    record, folder = feature_of_chats.record, feature_of_chats.config.output
    assert record.are_chats and record.num_proposed_tokens == 150
    assert min(record.acceptance_by_depth) > record.curve[0].acceptance + 0.05
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape[0] == 150 == weights["t2d"].sum()
    assert weights["embed_tokens.weight"].shape[0] == 300
    checkpoint = open_checkpoint("target", chat_target, ModelOptions())
    proposed = weights["t2d"].nonzero().ravel().numpy()
    shape = FeatureShape(hidden_size=weights["lm_head.weight"].shape[1])
    first = new_feature_draft(load_model(checkpoint), checkpoint, shape, 0, proposed)
    assert torch.equal(first.embed_tokens.weight, weights["embed_tokens.weight"])
    assert not torch.equal(first.lm_head.weight, weights["lm_head.weight"])
    config = ExportConfig(target=str(chat_target), draft=str(folder), output=tmp_path / "bundle")
    export_bundle(config, report=silent)
    with Pipeline.from_bundle(tmp_path / "bundle") as pipeline:
        for drafted, plain, options in (
            ("speculative", "sample", {"seed": 1}),
            ("speculative-beam-search", "beam-search", {"num_beams": 3}),
        ):
            assert_same_ids(pipeline, drafted, plain, "1 + 1", max_new_tokens=12, **options)


def test_interrupted_a_feature_draft_ends_the_same(feature_of_chats, chat_target, tmp_path):
    """Interrupted after its last step, its features lost: labelled again, and the same bits."""
    config = DistillConfig(**{**vars(feature_of_chats.config), "output": tmp_path / "draft"})
    interrupted(config, "step 0")
    [features] = (tmp_path / "draft.work" / "pool").glob("*.npy")
    features.unlink()
    record, _ = run(config)
    assert record.acceptance_by_depth == feature_of_chats.record.acceptance_by_depth
    assert_same_weights(config.output, feature_of_chats.config.output)
