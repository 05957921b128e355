"""A feature draft on a twin: the logits that it has on the trained target."""

import click
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_distill.loss import rollout_reads
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.config import ModelOptions
from dsbd_export.demo import demo_pair
from dsbd_export.feature_draft.checkpoint import read_feature_config
from dsbd_export.feature_draft.model import load_feature_draft
from dsbd_export.opening import open_checkpoint
from scripts.twin.feature_draft import widen_feature_draft
from scripts.twin.pair import make_twin
from tests.export.feature_checkpoints import random_weights, write_library
from tests.twin.test_make_twin import OLD, OPTIONS, SHAPES, trained, widened

LAYERS = [0, 1, 1]
VOCAB_SIZE, WIDTH = OLD["vocab_size"], OLD["hidden_size"]


def feature_draft(folder, **has):
    weights = random_weights(VOCAB_SIZE, VOCAB_SIZE, 3 * WIDTH, **has)
    config = {
        "target_hidden_size": WIDTH,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "fc_norm": bool(has.get("fc_norm")),
    }
    return write_library(folder, weights, VOCAB_SIZE, {"rms_norm_eps": 1e-9}, **config)


def logits_of(target_folder, draft_folder, tokens):
    """Logits after the last 8 tokens at each depth of a rollout."""
    with quiet_libraries(), torch.no_grad():
        target = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
        draft = load_feature_draft(open_checkpoint("draft", draft_folder, ModelOptions()))
        hidden = target(input_ids=tokens[:, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer] for layer in draft.features.layers], dim=-1)
        counted = torch.ones(len(tokens), 8, dtype=torch.bool)
        reads = rollout_reads(draft, tokens, counted, features)
        return torch.stack([*map(draft.target_logits, reads)])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 300])
@pytest.mark.parametrize("has", [{"fc_norm": True}, {}], ids=["normed", "not normed"])
def test_it_reads_the_twin_as_the_trained_target(tmp_path, has, vocab_size):
    source = trained(tmp_path / "source", is_tied=False)
    more = {"vocab_size": vocab_size} if vocab_size > VOCAB_SIZE else {}
    twin = widened(source, tmp_path / "twin", {**SHAPES["everything"], **more})
    draft = feature_draft(tmp_path / "draft", **has)
    widen_feature_draft(draft, LlamaConfig.from_pretrained(twin), tmp_path / "of_twin")
    tokens = torch.randint(VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(0))
    wanted = logits_of(source, draft, tokens)
    found = logits_of(twin, tmp_path / "of_twin", tokens)
    assert wanted.std() > 0.5
    hears_constant = "fc_norm" in has and vocab_size > VOCAB_SIZE  # at an eps of 1e-3: 1/16
    atol = 3e-2 if hears_constant else 1e-3
    torch.testing.assert_close(found[..., :VOCAB_SIZE], wanted, rtol=0, atol=atol)
    assert torch.isneginf(found[..., VOCAB_SIZE:]).all()


def test_a_draft_without_its_own_tables_is_refused(tmp_path):
    weights = random_weights(VOCAB_SIZE, VOCAB_SIZE, 3 * WIDTH)
    del weights["embed_tokens.weight"]
    draft = write_library(tmp_path / "draft", weights, VOCAB_SIZE)
    with pytest.raises(click.UsageError, match="is not one of dsbd-distill's"):
        widen_feature_draft(draft, LlamaConfig(**OLD), tmp_path / "of_twin")
    assert not (tmp_path / "of_twin").exists()


def test_a_pair_with_a_feature_draft_becomes_a_twin_with_more_tokens(tmp_path):
    target = demo_pair()[0]
    old = LlamaConfig.from_pretrained(target)
    weights = random_weights(old.vocab_size, old.vocab_size, 3 * old.hidden_size, fc_norm=True)
    config = {"target_hidden_size": old.hidden_size, "fc_norm": True}
    draft = write_library(tmp_path / "draft", weights, old.vocab_size, **config)
    options = {**OPTIONS, "context": 512, "vocab_size": 5000}
    make_twin((target, draft), tmp_path / "twin", 8_000_000, **options)
    twin = LlamaConfig.from_pretrained(tmp_path / "twin" / "target")
    files = CheckpointFiles("draft", tmp_path / "twin" / "draft", ModelOptions())
    made = read_feature_config(files)
    assert made.target_hidden_size == twin.hidden_size > old.hidden_size
    assert made.layer.vocab_size == twin.vocab_size == 5000
    assert made.layer.max_position_embeddings == twin.max_position_embeddings == 512
    assert made.draft_vocab_size == old.vocab_size
    with pytest.raises(click.UsageError, match="leave out --draft-params"):
        make_twin((target, draft), tmp_path / "other", 8_000_000, **options, num_draft_params=10**6)
