"""Composite models: what the text part is, what is left out, and what the manifest says of it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForMultimodalLM, Phi3Config, Phi3ForCausalLM

from dsbd_export.checkpoints.model_loading import AbsentPart, load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint, source_of
from dsbd_export.parity_cases import reference_logits, text_case
from dsbd_export.pipeline import export_model
from dsbd_export.progress import silent
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, write_checkpoint, write_family_checkpoint


def opened(folder, tmp_path, **options):
    config = ExportConfig(target="", draft="", output=tmp_path, **options)
    return open_checkpoint("target", folder, config), config


def test_the_text_part_gives_the_logits_of_the_whole_and_names_what_it_does_not_read(
    captures, tmp_path
):
    """Cohere2-Vision scales its logits, which a text model of the same weights would not."""
    folder = write_family_checkpoint("cohere2_vision", tmp_path / "checkpoint")
    checkpoint, config = opened(folder, tmp_path)
    model = load_model(checkpoint)
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    case = text_case(checkpoint)
    ids = torch.from_numpy(case.node_ids[None])
    with torch.no_grad():
        wanted = whole.eval()(input_ids=ids).logits[0].numpy()[case.rows]
    assert abs(reference_logits(model, case) - wanted).max() < 1e-5
    left_out = {name for name, part in model.named_modules() if isinstance(part, AbsentPart)}
    assert left_out == {"model.vision_tower", "model.multi_modal_projector"}
    entry = export_model(checkpoint, tmp_path, config, lambda _line: None, captures)
    assert (entry.family, entry.unread_inputs) == ("cohere2_vision", ["image"])


def test_a_part_that_was_left_out_raises_when_called():
    with pytest.raises(ExportError, match="'vision_tower' for text alone"):
        AbsentPart("vision_tower")(torch.zeros(1))


LONG, SHORT = 200, 64  # contexts beyond and up to the original one


@pytest.mark.parametrize("context", [LONG, SHORT])
def test_longrope_has_the_frequencies_of_the_exported_context(context, tmp_path):
    arguments = FAMILY_CHECKPOINTS["phi3-longrope-long"].arguments
    folder = write_checkpoint(tmp_path / "checkpoint", Phi3Config(**arguments))
    checkpoint, _ = opened(folder, tmp_path, max_context=context)
    found = source_of(checkpoint).load("fp32", silent)
    theirs = Phi3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 256, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # their frequencies follow from the length of the sequence
        assert (found(ids).logits - theirs(ids).logits).abs().max() < 1e-5
        frequencies = found.model.rotary_emb.inv_freq.clone()
        found(ids[:, :1])
        assert torch.equal(found.model.rotary_emb.inv_freq, frequencies)
