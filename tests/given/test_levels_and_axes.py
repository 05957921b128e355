"""A graph with three axes of positions (M-RoPE) and rows added after layers (DeepStack)."""

import numpy as np
import onnx_ir as ir
import torch

from dsbd_export.config import ModelOptions
from dsbd_export.given_prompt.kinds import GIVEN_KINDS
from dsbd_export.given_prompt.source import ExportedGivenRows
from dsbd_export.opening import open_checkpoint, source_of
from dsbd_export.progress import silent
from dsbd_runtime.parts.cache_entries import parts_of, past_name
from dsbd_runtime.parts.given_prompt import GivenPiece, GivenPrompt
from dsbd_runtime.parts.given_rows import GivenEntry
from scripts.family_checkpoints import write_family_checkpoint
from tests.ort_sessions import cpu_session
from tests.runtime.test_given_prompt import SOUND

PLACEHOLDER, LEVELS, AXES = 9, 2, 3
IDS = [1, 2, 9, 9, 9, 9, 3, 9, 9, 4, 5]
POSITIONS = np.array(  # two pictures of 2 x 2 and 1 x 2
    [
        [0, 1, 2, 2, 2, 2, 4, 5, 5],
        [0, 1, 2, 2, 3, 3, 4, 5, 5],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
)


@torch.no_grad()
def own_logits(model, positions, embeddings):
    """Return the logits (S, V) of the model's own forward over embeddings and levels."""
    width = model.get_input_embeddings().weight.shape[1]
    first, *levels = torch.from_numpy(embeddings).split(width, dim=1)
    ids = torch.tensor([IDS])
    is_given = ids == PLACEHOLDER
    embedded = model.get_input_embeddings()(ids).masked_scatter(is_given[..., None], first)
    hidden = model.model.language_model(
        inputs_embeds=embedded,
        position_ids=torch.from_numpy(positions)[:, None],
        visual_pos_masks=is_given,
        deepstack_visual_embeds=levels,
        use_cache=False,
    ).last_hidden_state
    return model.lm_head(hidden)[0].numpy()


def captured(folder, checkpoint, given):
    """Return a session on the graph with given rows, and its caches."""
    source = source_of(checkpoint)
    model = source.load("fp32", silent)
    checkpoint = source.probed(model, "fp32")
    part = ExportedGivenRows(checkpoint, given, GIVEN_KINDS["qwen3_asr"])
    parts = [*source.parts(ModelOptions()), part]
    [graph] = source.capture(model, parts, silent)
    ir.save(graph.graph, folder / "model.onnx")
    return cpu_session(folder / "model.onnx"), checkpoint.caches


def called(session, caches, positions, rows, embeddings):
    size = len(IDS)
    feeds = {
        "input_ids": np.array([IDS]),
        "position_ids": positions,
        "attention_mask": np.tri(size, dtype=np.bool_)[None, None],
        "write_indices": np.zeros(1, np.int64),
        "logit_rows": np.arange(size),
        "given_rows": rows,
        "given_embeddings": embeddings,
    }
    for cache, name in parts_of(caches):
        feeds[past_name(cache.layer, name)] = np.zeros(cache.shape(name, size), np.float32)
    return session.run(["logits"], feeds)[0]


def test_qwen3_vl(tmp_path):
    checkpoint = open_checkpoint(
        "target", write_family_checkpoint("qwen3_vl", tmp_path / "checkpoint"), ModelOptions()
    )
    width = checkpoint.config.hidden_size
    given = GivenEntry(
        placeholder_token_id=PLACEHOLDER,
        width=width,
        levels=LEVELS,
        position_axes=AXES,
        medium=SOUND,
    )
    session, caches = captured(tmp_path, checkpoint, given)
    rng, number = np.random.default_rng(0), IDS.count(PLACEHOLDER)
    embeddings = rng.normal(size=(number, given.row_width)).astype(np.float32)
    pieces = [GivenPiece({"values": embeddings[:4]}, 4), GivenPiece({"values": embeddings[4:]}, 2)]
    places = (np.array(IDS) == PLACEHOLDER).nonzero()[0]
    prompt = GivenPrompt(places, pieces, POSITIONS)
    positions = prompt.on_axes(np.arange(len(IDS)), AXES)
    assert positions[:, -2:].tolist() == [[7, 8]] * 3
    model = source_of(checkpoint).load("fp32", silent)
    wanted = own_logits(model, positions, embeddings)
    found = called(session, caches, positions, places, embeddings)
    assert np.abs(found - wanted).max() <= 2e-5
    without = embeddings.copy()
    without[:, width:] = 0
    for other in (
        called(session, caches, positions, places, without),
        called(session, caches, np.tile(np.arange(len(IDS)), (AXES, 1)), places, embeddings),
        called(session, caches, positions, places[:0], embeddings[:0]),
    ):
        assert np.abs(other - wanted).max() > 1e-2
