"""The checkpoints of lab/run translation, and its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from lab.peers.catalog import OURS
from lab.translation.comparison import (
    DRAFTED,
    FIRST_TOKEN,
    GREEDY,
    LONG_SOURCE,
    SEARCH,
    WHOLE,
    comparison_of,
    prompts_of,
)
from lab.translation.report import BAR_COLUMNS, COLUMNS, tables_of
from lab.translation.shapes import SHAPES, Shape
from lab.translation.small_model import NUM_TOKENS, Language, SmallTranslator, train
from lab.translation.widened import write_checkpoint
from tests.lab.lab_run import lab_run

VOCAB_SIZE = NUM_TOKENS + 260  # the bytes, and some more
SMALL = {
    "width": 512,
    "num_layers": 3,
    "middle": 160,
    "num_heads": 8,
    "vocab_size": VOCAB_SIZE,
}


def small_shape(name: str) -> Shape:
    shape = replace(SHAPES[name], **SMALL)
    if name == "nllb-600m":
        return shape
    return replace(shape, padding_token=VOCAB_SIZE - 1, start_token=VOCAB_SIZE - 1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_computes_what_the_small_model_does(name, tmp_path):
    shape = small_shape(name)
    torch.manual_seed(0)
    language = Language(shape)
    small = SmallTranslator(shape, language)
    with torch.no_grad():
        for parameter in small.parameters():  # norms and biases too are some
            parameter += 0.02 * torch.randn_like(parameter)
        small.fix_constant()
        sources, targets = language.sentences(2, 9, torch.Generator().manual_seed(1))
        wanted = small.decode(targets, small.encode(sources)).log_softmax(-1)
    write_checkpoint(small.state_dict(), shape, shape.num_layers, tmp_path / "target")
    with quiet_libraries(), torch.no_grad():
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "target").eval()
        start = torch.full((2, 1), shape.start_token)
        begun = torch.cat([start, targets[:, :-1]], 1)
        found = model(input_ids=sources, decoder_input_ids=begun).logits.log_softmax(-1)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert (found[..., :NUM_TOKENS] - wanted).abs().max() < 1e-3
    assert found[..., NUM_TOKENS:].max() < -40
    assert tokenizer("<w8><w20>").input_ids == [8, 20, shape.end_token]


def test_a_draft_has_the_encoder_of_its_target(tmp_path):
    shape = small_shape("opus-mt")
    language = Language(shape)
    target, draft = SmallTranslator(shape, language), SmallTranslator(shape, language, 1)
    draft.shared, draft.encoder = target.shared, target.encoder
    for role, model, num_layers in (("target", target, 3), ("draft", draft, 1)):
        write_checkpoint(model.state_dict(), shape, num_layers, tmp_path / role)
    one, other = (load_file(tmp_path / role / "model.safetensors") for role in ("target", "draft"))
    for name, tensor in one.items():
        if not name.startswith("model.decoder.layers."):
            assert torch.equal(tensor, other[name]), name
    assert "model.decoder.layers.1.fc1.weight" not in other


def test_a_training_lowers_the_loss():
    shape = small_shape("opus-mt")
    torch.manual_seed(0)
    language = Language(shape)
    losses = [step.loss for step in train(SmallTranslator(shape, language), language, 12)]
    assert losses[-1] < losses[0] - 1


def report_of(seconds: dict[tuple[str, str], float]) -> dict[str, object]:
    """A report of two sources and two rounds; seconds of a token by tool and run."""
    shape = SHAPES["opus-mt"]
    prompts = prompts_of(shape, 2)
    lengths = {FIRST_TOKEN: 1, WHOLE: 25, LONG_SOURCE: 48}
    rows, requests = [], []
    for (tool, run), each in seconds.items():
        names = {"peer": tool, "precision": "fp32", "run": run}
        rows += [
            {**names, "work": work, "reason": None} for work in (FIRST_TOKEN, WHOLE, LONG_SOURCE)
        ]
        for number in range(2):
            for index, prompt in enumerate(prompts):
                length = lengths[prompt.work]
                requests.append(
                    {
                        **names,
                        "work": prompt.work,
                        "prompt_index": index,
                        "round": number,
                        "seconds": 0.5 + each * length,
                        "token_ids": [7] * length,
                        "num_iterations": None if tool != OURS else length,
                        "peak_bytes": 2_000_000,
                    }
                )
    failed = {"peer": "transformers", "precision": "fp32", "run": GREEDY, "work": FIRST_TOKEN}
    rows.append({**failed, "reason": "failed:\n no |memory"})
    return {"prompts": [vars(prompt) for prompt in prompts], "rows": rows, "requests": requests}


def test_the_table_says_what_a_token_takes_and_who_is_faster():
    lines = tables_of(
        report_of(
            {
                (OURS, GREEDY): 0.01,
                (OURS, DRAFTED[GREEDY]): 0.005,
                ("ctranslate2", GREEDY): 0.04,
            }
        )
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line]
    assert cells[0] == list(COLUMNS)
    plain, drafted, theirs, failed = (dict(zip(COLUMNS, row, strict=False)) for row in cells[2:6])
    assert plain["a further token, ms"].startswith("10.0 ")
    assert plain["whole, ms"].startswith("750.0 ")
    assert plain["ours / theirs"] == "" and plain["tokens a call"] == "1.00"
    assert drafted["ours / theirs"].startswith("**1.20** ")
    assert drafted["ours / theirs"].endswith("times without")
    assert theirs["ours / theirs"].startswith("**2.00** ")
    assert theirs["same tokens"] == "6/6" and theirs["tokens a call"] == ""
    assert failed["source and first token, ms"].startswith("failed: no \\")
    assert cells[6] == list(BAR_COLUMNS)
    assert cells[8][:3] == [GREEDY, "fp32", "1.3"] and cells[9][0] == DRAFTED[GREEDY]


def test_what_is_asked_of_every_tool():
    comparison = comparison_of(SHAPES["opus-mt"])
    runs = {
        peer.name: [(run.precision, run.name) for run in peer.runs] for peer in comparison.peers
    }
    assert runs["transformers"] == [("fp32", GREEDY), ("fp32", SEARCH)]
    assert runs["ctranslate2"] == [(p, run) for p in ("fp32", "int8") for run in (GREEDY, SEARCH)]
    prompts = prompts_of(SHAPES["opus-mt"], 2)
    assert [len(prompt.token_ids) for prompt in prompts] == [25, 25, 25, 25, 200]
    assert [prompt.max_new_tokens for prompt in prompts] == [1, 1, 32, 32, 48]
    assert prompts[0].token_ids == prompts[2].token_ids


def test_an_unknown_tool_is_refused(tmp_path):
    done = lab_run("translation", "--shape", "opus-mt", "--tool", "x", "--work", tmp_path)
    assert done.returncode == 2
    assert "--tool is 'x': expected one of dsbd-ort, ctranslate2, transformers" in done.stderr
