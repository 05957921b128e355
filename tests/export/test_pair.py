"""Properties that target and draft must share or get, and how much they agree."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PhiConfig

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.gate import agreement as measuring
from dsbd_export.opening import open_pair
from dsbd_export.pair import agreed_pair, context_warning, resize_vocabulary
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.conftest import SIZES, edit_json, opened
from tests.exports import export_quietly

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "n_inner": 24}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def pair_of(target, draft):
    lines: list[str] = []
    config = ExportConfig(target=str(target), draft=str(draft), output=Path("out"))
    return *agreed_pair(*open_pair(config), lines.append), lines


def changed_copy(source, folder, **fields):
    """A copy of a checkpoint with other fields in config.json, which then counts alone."""
    shutil.copytree(source, folder)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **fields)
    return folder


def test_equal_checkpoints_stay_as_they_are(llama_folder):
    target, draft, lines = pair_of(llama_folder, llama_folder)
    assert (target.vocab_size, draft.vocab_size, lines) == (VOCAB_SIZE, VOCAB_SIZE, [])


SPECIAL_TOKENS = [  # (fields of the draft, what is reported)
    ({"eos_token_id": [1, 2]}, "draft: eos_token_ids is [1, 2] in the checkpoint, [1] here"),
    ({"eos_token_id": None}, "draft: eos_token_ids is [] in the checkpoint, [1] here"),
    ({"bos_token_id": 3}, "draft: bos_token_id is 3 in the checkpoint, 0 here"),
]


@pytest.mark.parametrize(("fields", "line"), SPECIAL_TOKENS)
def test_a_sequence_begins_and_ends_as_the_target_has_it(llama_folder, tmp_path, fields, line):
    target, draft, lines = pair_of(
        llama_folder, changed_copy(llama_folder, tmp_path / "draft", **fields)
    )
    assert (draft.bos_token_id, draft.eos_token_ids) == (0, [1])
    assert (target.bos_token_id, target.eos_token_ids) == (0, [1])
    assert lines == [line]


@pytest.mark.parametrize("padded", ["target", "draft"])
def test_padding_of_the_vocabulary_is_cut(llama_folder, tmp_path, padded):
    wide = changed_copy(llama_folder, tmp_path / "wide", vocab_size=VOCAB_SIZE + 20)
    folders = {"target": llama_folder, "draft": llama_folder, padded: wide}
    target, draft, lines = pair_of(folders["target"], folders["draft"])
    assert target.vocab_size == draft.vocab_size == VOCAB_SIZE
    assert lines == [f"{padded}: vocab_size is 320 in the checkpoint, 300 here"]


def test_a_vocabulary_without_room_for_all_tokens(llama_folder, tmp_path):
    narrow = changed_copy(llama_folder, tmp_path / "narrow", vocab_size=260)
    words = r"300 in the target and 260 in the draft.*ids up to 2\d\d"
    with pytest.raises(ExportError, match=words):
        pair_of(llama_folder, narrow)


CONFIGS = {"tied": GPT2Config, "biased": PhiConfig}  # ties and a bias of the head change as well


@pytest.mark.parametrize("size", [290, 320])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_another_size_keeps_the_logits_of_its_tokens(tmp_path, kind, size):
    config = CONFIGS[kind](vocab_size=size, **SPECIAL, **SMALL)
    checkpoint = replace(opened(write_checkpoint(tmp_path, config)), vocab_size=VOCAB_SIZE)
    model = load_model(checkpoint)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(tokens).logits
        resize_vocabulary(model, checkpoint)
        found = model(tokens).logits
    left = min(size, VOCAB_SIZE)
    torch.testing.assert_close(found[..., :left], wanted[..., :left])
    more = wanted[..., -1:].expand(1, 12, VOCAB_SIZE - left)  # as the last token
    torch.testing.assert_close(found[..., left:], more)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert model.config.vocab_size == VOCAB_SIZE
    assert (head.weight is embedding.weight) is (kind == "tied")


def test_an_uncut_model_is_left_alone(llama_folder):
    target, _, _ = pair_of(llama_folder, llama_folder)
    model = load_model(target)
    weight = model.get_input_embeddings().weight
    resize_vocabulary(model, target)
    assert model.get_input_embeddings().weight is weight


def swapped(vocab, one, other):
    vocab[one], vocab[other] = vocab[other], vocab[one]


def without_last_merge(model):
    del model["vocab"]["".join(model["merges"].pop())]


DIFFERENT = [
    (lambda model: swapped(model["vocab"], "def", "path"), r"vocabularies differ: token '\w+' is"),
    (without_last_merge, r"vocabularies differ: \d+ tokens in the target's tokenizer, \d+"),
    (lambda model: model["merges"].reverse(), "merge 0 is"),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENT)
def test_tokenizers_that_do_not_agree(llama_folder, tmp_path, change, words):
    draft = with_tokenizer(llama_folder, tmp_path / "draft", lambda all: change(all["model"]))
    with pytest.raises(ExportError, match=words):
        pair_of(llama_folder, draft)


def with_added(*tokens):
    def change(content):
        first = max(content["model"]["vocab"].values()) + 1
        flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
        content["added_tokens"] += [
            {"id": first + index, "content": token, "normalized": False, **flags}
            for index, token in enumerate(tokens)
        ]

    return change


def test_added_tokens_that_mean_another_thing(llama_folder, tmp_path):
    target = with_tokenizer(llama_folder, tmp_path / "target", with_added("<a>", "<b>"))
    draft = with_tokenizer(llama_folder, tmp_path / "draft", with_added("<b>", "<a>"))
    words = r"added tokens differ: (\d+) is '<a>' in the target.*in the draft's it is '<b>', and"
    with pytest.raises(ExportError, match=words):
        pair_of(target, draft)


def test_added_tokens_of_one_alone_are_reported(llama_folder, tmp_path):
    other = with_tokenizer(llama_folder, tmp_path / "other", with_added("<a>", "<b>"))
    for target, draft, whose in ((other, llama_folder, "target"), (llama_folder, other, "draft")):
        *_, lines = pair_of(target, draft)
        assert lines == [f"only the {whose}'s tokenizer has the added tokens <a>, <b>"]


def test_splitting_of_texts_and_format_of_merges_may_differ(llama_folder, tmp_path):
    """Families have classes of their own, which rebuild one tokenizer.json in different ways."""

    def change(content):
        content["model"]["dropout"] = 0.1
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
        content["added_tokens"][1]["normalized"] = True

    *_, lines = pair_of(llama_folder, with_tokenizer(llama_folder, tmp_path / "draft", change))
    assert lines == []


def with_tokenizer(source, folder, change):
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


CONTEXTS = [  # (of the target, of the draft, max_context, what the warning says)
    (256, 256, None, None),
    (256, 256, 256, None),
    (256, 512, None, None),
    (512, 256, None, "can use 256 tokens, the context of the draft; that of the target is 512"),
    (512, 256, 100_000, "can use 256 tokens, the context of the draft"),
    (256, 512, 100_000, "can use 256 tokens, the context of the target; max_context is"),
    (256, None, None, None),
    (256, None, 256, None),
    (256, None, 512, "can use 256 tokens, the context of the target; max_context is 512"),
]


def test_a_shorter_context_is_warned_of(llama_folder):
    """A draft that reads features shortens the context; others read the end of a text."""
    checkpoint = pair_of(llama_folder, llama_folder)[0]
    for of_target, of_draft, wished, words in CONTEXTS:
        target = replace(checkpoint, context_length=of_target)
        draft = of_draft and replace(checkpoint, role="draft", context_length=of_draft)
        if draft:
            plain = context_warning(target, draft, wished)
            assert plain == context_warning(target, None, wished)
            draft = replace(draft, target_folder=llama_folder)
        warning = context_warning(target, draft, wished)
        assert (warning is None) == (words is None)
        assert words is None or (warning.startswith("warning: requests ") and words in warning)


def agreement_in_torch(folders, prompts, ends):
    """Return (best, overlap, best_four) over the greedy answers of the target, and their number."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders
    )
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(measuring._NEW_TOKENS):
            with torch.no_grad():
                p, q = (model(ids).logits[0, -1].softmax(-1) for model in (target, draft))
            best = int(p.argmax())
            four = q.topk(4).indices.tolist()
            top = [set(each.topk(64).indices.tolist()) for each in (p, q)]
            both = sum(min(float(p[t]), float(q[t])) for t in top[0] & top[1])
            rows.append((best == four[0], both, best in four))
            if best in ends:
                break
            ids = torch.cat([ids, torch.tensor([[best]])], dim=1)
    return np.mean(rows, axis=0), len(rows)


def test_the_agreement_is_that_of_the_checkpoints(captures, tmp_path):
    """Both have heads of their own, so that some of their best tokens agree."""
    folders = [
        write_checkpoint(tmp_path / str(n), LlamaConfig(**SIZES, num_hidden_layers=n))
        for n in (2, 1)
    ]
    bundle = open_bundle(export_quietly(captures, tmp_path / "bundle", *folders))
    target, found = bundle.manifest.target, bundle.entry("draft").agreement
    assert found is not None and bundle.entry("target").agreement is None
    most = target.context_length - measuring._NEW_TOKENS
    prompts = [ids[-most:] for ids in measuring._prompts(bundle.path, target.bos_token_id)]
    wanted, number = agreement_in_torch(folders, prompts, target.eos_token_ids)
    assert found.num_tokens == number
    assert (found.best, found.overlap, found.best_four) == pytest.approx(wanted, abs=2e-3)


def test_the_agreement_of_a_draft_that_is_added_later(alone, llama_folder, tmp_path):
    """The target itself as a draft agrees in everything."""
    bundle = Path(shutil.copytree(alone, tmp_path / "bundle"))
    config = DraftConfig(bundle=bundle, draft=str(llama_folder))
    found = asdict(export_draft(config, report=silent).manifest.draft.agreement)
    assert found.pop("num_tokens") > 0
    assert found["best"] == found["best_four"] == 1.0 >= found["overlap"] > 0.5
