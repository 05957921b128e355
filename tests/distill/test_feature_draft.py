"""A feature draft that is distilled: its rollout, its files, and that it learns."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from dsbd_distill.acceptance import Best, acceptance_by_depth
from dsbd_distill.draft_model import (
    FeatureShape,
    feature_shape,
    new_feature_draft,
    write_feature_draft,
)
from dsbd_distill.lesson import Lesson
from dsbd_distill.loss import NUM_STEPS, DraftHead, rollout, rollout_loss, rollout_reads, visible
from dsbd_distill.teacher import Sampling, TeacherFeatures, TorchDevice
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.checkpoint import FeatureDraftConfig
from dsbd_export.feature_draft.model import FeatureDraft, load_feature_draft
from dsbd_export.feature_draft.source import rolled_out
from dsbd_export.opening import kind_of, open_checkpoint
from dsbd_export.pipeline import export_model
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from scripts.family_checkpoints import VOCAB_SIZE
from tests.distill.conftest import CONTEXT, FILES, STEPS, config_of, opened, run

EXACT = TorchDevice("cpu", uses_bf16=False)
ALL = DraftHead(32, None, EXACT)
WIDTH = 24


@pytest.fixture(scope="module")
def draft():
    return draft_of(32)


def draft_of(num_proposed):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    layer = LlamaConfig(**sizes, **heads, max_position_embeddings=64)
    sizes = {"draft_vocab_size": num_proposed, "target_hidden_size": WIDTH // 3}
    config = FeatureDraftConfig(layer=layer, **sizes, norm_output=True)
    return FeatureDraft(config).eval()


def test_rows_see_their_ancestors():
    """With 4 rows, row 3 of step 2 sees rows 0 and 1 of step 0, row 2 of step 1, and itself."""
    seen = visible(4, 2, "cpu")[0, 0]
    assert seen.shape == (4, 12)
    assert seen[3].nonzero().ravel().tolist() == [0, 1, 4 + 2, 8 + 3]
    assert seen[2].nonzero().ravel().tolist() == [0, 4 + 1, 8 + 2]
    assert torch.equal(visible(3, 0, "cpu")[0, 0], torch.ones(3, 3).tril().bool())
    assert visible(4, 3, "cpu").any(-1).all()  # a row that sees nothing would be no number


def test_every_step_is_what_the_draft_computes_along_a_path(draft):
    """Row t of step j is the last one after t - j given features and j own ones."""
    tokens = torch.randint(0, 32, (2, 9))
    features = torch.randn(2, 8, WIDTH)
    with torch.no_grad():
        steps = list(rollout(draft, tokens, features, NUM_STEPS))
        projected = draft.projected(features)
        for step, found in enumerate(steps):
            for row in range(step, 8):
                for sequence in range(2):
                    along = tokens[sequence, 1 : row + 2]
                    given = projected[sequence, : row - step + 1]
                    wanted = rolled_out(draft, along, given)[-1]
                    assert torch.allclose(found[sequence, row], wanted, atol=1e-5), (step, row)


def test_the_loss_judges_every_step(draft):
    """Of a draft whose head says nothing, every step has the same loss; later ones also count."""
    tokens = torch.randint(0, 32, (2, 9))
    ids = torch.arange(32).expand(2, 9, 32)
    log_p = torch.log_softmax(torch.randn(2, 9, 32), -1)
    counted = torch.ones(2, 9, dtype=torch.bool)
    features = torch.randn(2, 8, WIDTH)
    batch = (tokens, ids, log_p, counted, features, torch.tensor(0.0))
    losses = {}
    for name, weight in (("trained", 1.0), ("flat", 0.0)):
        draft.lm_head.weight.data *= weight
        losses[name] = rollout_loss(draft, batch, ALL, EXACT).item()
    kl = (log_p.exp() * (log_p + torch.log(torch.tensor(32.0)))).sum(-1)
    # step j judges the rows from j on: labels after tokens 1 + j to 8, every other but in step 0
    judged = [kl[:, 1 + step :: 2 if step else 1] for step in range(NUM_STEPS)]
    wanted = [kl_of_step.mean().item() * 0.8**step for step, kl_of_step in enumerate(judged)]
    assert losses["flat"] == pytest.approx(sum(wanted) / sum(0.8**j for j in range(NUM_STEPS)))


def test_of_some_tokens_the_loss_is_that_of_what_can_be_proposed():
    """KL of the target over what a short head has, by place times the probability of all that."""
    tokens, proposed = torch.randint(0, 32, (2, 9)), np.array([1, 4, 5, 9, 17, 30])
    draft = draft_of(6)
    ids = torch.arange(32).expand(2, 8, 32)
    log_p = torch.log_softmax(torch.randn(2, 8, 32), -1)
    counted = torch.ones(2, 8, dtype=torch.bool)
    features = torch.randn(2, 8, WIDTH)
    batch = (tokens, ids, log_p, counted, features, torch.tensor(0.0))
    found = rollout_loss(draft, batch, DraftHead(32, proposed, EXACT), EXACT)
    found.backward()
    assert draft.lm_head.weight.grad.abs().sum() > 0
    total, weights = 0.0, 0.0
    with torch.no_grad():
        for step, normed in enumerate(rollout(draft, tokens, features, NUM_STEPS)):
            log_q = draft.lm_head(normed).log_softmax(-1)
            p = log_p[:, :, proposed].exp()
            mass = p.sum(-1, keepdim=True)
            kl = (mass * (p / mass) * ((p / mass).log() - log_q)).sum(-1)
            judged = kl[:, step :: 2 if step else 1]
            total, weights = total + 0.8**step * judged.mean().item(), weights + 0.8**step
    assert found.item() == pytest.approx(total / weights, rel=1e-4)


def test_features_are_what_enters_the_layers(target):
    model = load_model(opened(target))
    tokens = torch.randint(0, VOCAB_SIZE, (2, 7))
    taken = TeacherFeatures(model, (0, 1), 32)
    with torch.no_grad():
        with taken.taken() as parts:
            for _ in range(2):
                model(input_ids=tokens)
        hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden[0], hidden[1]], dim=-1).bfloat16()
    assert taken.width == 64 and len(parts) == 2
    assert all(torch.equal(part, wanted) for part in parts)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_short_head_is_of_the_tokens_that_are_proposed(target, tmp_path):
    """Its rows begin as those of the embedding, and its files name the tokens in both ways."""
    checkpoint = opened(target)
    proposed = np.array([0, 1, 7, 100, 299])
    shape = FeatureShape(hidden_size=32)
    draft = new_feature_draft(load_model(checkpoint), checkpoint, shape, 0, proposed)
    assert sum(p.numel() for p in draft.parameters()) == shape.num_parameters(300, 5, 64)
    assert torch.equal(draft.lm_head.weight, draft.embed_tokens.weight[proposed])
    write_feature_draft(draft, checkpoint, tmp_path / "draft")
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert written["t2d"].nonzero().ravel().tolist() == proposed.tolist()
    assert (written["d2t"] + torch.arange(5)).tolist() == proposed.tolist()
    read = load_feature_draft(open_checkpoint("draft", tmp_path / "draft", ModelOptions()))
    assert read.proposed_tokens().tolist() == proposed.tolist()
    logits = read.target_logits(torch.randn(3, 32))
    assert torch.isfinite(logits[0]).nonzero().ravel().tolist() == proposed.tolist()


def test_a_short_head_leaves_room_for_a_wider_layer(target):
    checkpoint = opened(target)
    whole, short = (feature_shape(100_000, 0, checkpoint, num) for num in (None, 40))
    assert (whole.hidden_size, short.hidden_size) == (32, 64)


def test_acceptance_by_depth_is_that_of_each_steps_logits():
    samples = Lesson(
        np.zeros((2, 5), np.uint32),
        np.array([[[0, 1]] * 3] * 2, np.uint32),
        np.log(np.full((2, 3, 2), 0.5, np.float32)),
        np.ones((2, 3), bool),
    )
    model = FixedDraft()
    uniform, certain = torch.zeros(6, 2), torch.tensor([20.0, -20.0]).expand(6, 2)
    sampling = Sampling(temperature=1.0, top_k=2)
    depths = [*map(Best.of, (uniform, certain))]
    found = acceptance_by_depth(model, lambda *_: iter(depths), [samples], sampling, EXACT)
    assert found.by_depth == pytest.approx((1.0, 0.5))
    assert (found.rate, found.error) == pytest.approx((1.0, 0.0))


class FixedDraft(torch.nn.Module):
    config = LlamaConfig(vocab_size=2)


def test_it_learns_at_every_depth(distilled_feature, target):
    config, record = distilled_feature.config, distilled_feature.record
    first, last = record.curve[0], record.curve[-1]
    assert (first.step, last.step) == (0, STEPS)
    by_depth = record.acceptance_by_depth
    assert len(by_depth) == NUM_STEPS and by_depth[0] == record.acceptance
    assert min(by_depth) > first.acceptance + 0.1
    assert record.acceptance > first.acceptance + 10 * record.acceptance_error
    words = "held-out acceptance " + ", then ".join(f"{x:.3f}" for x in by_depth)
    assert words in distilled_feature.report[-1]
    assert record.num_parameters <= 60_000
    assert [path.name for path in config.output.parent.iterdir()] == ["draft"]


def test_it_is_written_as_published_and_exports(distilled_feature, target, tmp_path):
    config, record = distilled_feature.config, distilled_feature.record
    assert {path.name for path in config.output.iterdir()} == FILES
    assert read_record(config.output / RECORD_FILE) == record
    content = json.loads((config.output / "config.json").read_text())
    assert content["speculators_model_type"] == "eagle3"
    assert content["eagle_aux_hidden_state_layer_ids"] == [0, 1]  # the target has two layers
    assert content["transformer_layer_config"]["model_type"] == "llama"
    options = ModelOptions()
    pair = [
        open_checkpoint(role, folder, options)
        for role, folder in (("target", target), ("draft", config.output))
    ]
    _, draft = kind_of(pair[1]).paired(*pair, silent)
    assert draft.context_length == CONTEXT
    module = load_feature_draft(draft)
    assert sum(p.numel() for p in module.parameters()) == record.num_parameters
    entry = export_model(draft, tmp_path, options, silent)
    assert entry.parity.max_abs_error < 1e-4
    assert (tmp_path / "draft" / RECORD_FILE).is_file()

    model = load_model(opened(target))
    tokens = torch.randint(0, VOCAB_SIZE, (1, 12))
    counted = torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        hidden = model(input_ids=tokens[:, :-1], output_hidden_states=True).hidden_states
        first, *_ = rollout_reads(module, tokens, counted, torch.cat(hidden[:2], dim=-1))
    assert module.target_logits(first).shape == (4, VOCAB_SIZE)


def test_too_few_parameters_are_refused_before_weights_are_read(target, texts, tmp_path):
    config = config_of(target, texts, tmp_path / "draft", kind="feature", params="9K")
    with pytest.raises(ExportError, match="params=9000 is too few for a vocabulary of 300 tokens"):
        run(config)
    assert not list(tmp_path.iterdir())
