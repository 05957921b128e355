"""Tokenizers of no language: items of a recommender, molecules, proteins, genes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

import dsbd_ort
from dsbd_export.errors import ExportError
from dsbd_export.parity_cases import num_drawn, text_case
from dsbd_export.quantization.row_forms import calibration_case
from scripts.family_checkpoints import write_checkpoint
from tests.export.conftest import SIZES, opened, write_merges, written_tokenizer
from tests.exports import export_quietly
from tests.tokenizer_corpus import write_tokenizer

ATOMS = r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]|[()=#+\-./\\:~@?>*$%0-9]"
UNKNOWN = "[UNK]"


@dataclass(frozen=True)
class Alphabet:
    make: Any  # returns a tokenizer of the tokens
    tokens: tuple[str, ...]  # in addition to the special ones
    text: str
    read_as: tuple[str, ...]


def words(*steps: Any, separator: str | None = None) -> Any:
    """Whole words alone, whose unknown token is special."""

    def made(vocab: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
        if separator is not None:
            tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
        return tokenizer

    return made


def letters(vocab: dict[str, int]) -> Tokenizer:
    """Letters alone; others are no token at all."""
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


ITEMS = tuple(f"item_{number}" for number in range(200))
MOLECULES = ("C", "c", "O", "N", "(", ")", "=", "1", "2", "Br", "[C@H]", "[nH]")
SPLIT_ATOMS = pre_tokenizers.Split(Regex(ATOMS), "isolated")
BY_SPACES = pre_tokenizers.WhitespaceSplit()
ALPHABETS = {
    "items": Alphabet(words(BY_SPACES), ITEMS, "item_7 item_199", ("item_7", "item_199")),
    "molecules": Alphabet(
        words(SPLIT_ATOMS, separator=""), MOLECULES, "c1[nH]cBr", ("c", "1", "[nH]", "c", "Br")
    ),
    "proteins": Alphabet(words(BY_SPACES), tuple("LAGVSERTIDPKQNFYMHWC"), "M K V", tuple("MKV")),
    "genes": Alphabet(letters, tuple("ACGT"), "GATTACA", tuple("GATTACA")),
}


def write(folder: Path, alphabet: Alphabet) -> Path:
    names = ("[PAD]", UNKNOWN, "[EOS]", *alphabet.tokens)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "vocab_size": len(names)})
    write_checkpoint(folder, config)
    PreTrainedTokenizerFast(
        tokenizer_object=alphabet.make({name: index for index, name in enumerate(names)}),
        unk_token=UNKNOWN,
        pad_token="[PAD]",
        eos_token="[EOS]",
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ALPHABETS)
def test_it_is_written_and_english_is_warned_of(name, tmp_path):
    alphabet = ALPHABETS[name]
    tokenizer, lines = written_tokenizer(
        opened(write(tmp_path / "model", alphabet)), tmp_path / "files"
    )
    ids = tokenizer.encode(alphabet.text, add_special_tokens=False)
    assert tuple(map(tokenizer.piece, ids)) == alphabet.read_as
    assert tokenizer.decode(ids) == alphabet.text
    warned = [line for line in lines if "tokenizer reads English as '" in line]
    assert len(warned) == 1


@pytest.mark.parametrize("name", ALPHABETS)
def test_the_checks_of_the_export_read_its_tokens(name, tmp_path):
    checkpoint = opened(write(tmp_path / "model", ALPHABETS[name]))
    for case, number in ((text_case(checkpoint), 128), (calibration_case(checkpoint, ()), 512)):
        seen = case.node_ids
        assert len(seen) == min(number if number == 512 else 320, checkpoint.context_length)
        assert seen.max() < num_drawn(checkpoint)
        assert len(set(seen.tolist())) > len(ALPHABETS[name].tokens) / 2


def test_texts_for_calibration_that_it_cannot_read_are_refused(tmp_path):
    checkpoint = opened(write(tmp_path / "model", ALPHABETS["items"]))
    (tmp_path / "own.txt").write_text("Hello, world\n")
    with pytest.raises(ExportError, match=r"reads 1 texts as nothing, .*'Hello, world\\n'"):
        calibration_case(checkpoint, (str(tmp_path / "own.txt"),))
    (tmp_path / "own.txt").write_text("item_3 item_4\n")
    case = calibration_case(checkpoint, (str(tmp_path / "own.txt"),))
    np.testing.assert_array_equal(case.node_ids, [6, 7])


@pytest.mark.long
def test_an_exported_bundle(captures, tmp_path):
    source = write(tmp_path / "model", ALPHABETS["genes"])
    bundle = export_quietly(captures, tmp_path / "bundle", source)
    with dsbd_ort.Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        found = pipe.generate("GATTACA", max_new_tokens=6, num_beams=2).sequences[0]
        assert set(found.text) <= set("ACGT")


def test_tokens_that_no_text_becomes_are_refused(tmp_path):
    """Hyphens are split off, and no part is a token."""
    items = tuple(f"sku-{number}" for number in range(50))
    alphabet = Alphabet(words(pre_tokenizers.Whitespace()), items, "", ())
    checkpoint = opened(write(tmp_path / "model", alphabet))
    text = r"reads 'sku-0', the text of its token 3, as \[1, 1, 1\], which is ''"
    with pytest.raises(ExportError, match=text):
        written_tokenizer(checkpoint, tmp_path / "files")


def test_a_class_that_loses_tokens_of_older_files_is_refused(tmp_path):
    """A vocabulary with spaces as in sentencepiece, read by a class that spells bytes."""
    source = write_tokenizer("llama_2", tmp_path / "checkpoint")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    write_merges(source, model["merges"])
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ExportError, match=r"loses \d\d of \d{3} such texts.*set tokenizer_class"):
        written_tokenizer(opened(source), tmp_path / "files")
