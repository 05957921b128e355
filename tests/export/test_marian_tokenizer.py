"""Marian's tokenizers: two sentencepiece files, whose pieces have the ids of a vocabulary."""

import io
import json
import warnings
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoModelForSeq2SeqLM, MarianTokenizer

import dsbd_ort
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.older_tokenizers import write_source_tokenizer
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.tokenizer import Tokenizer
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import edit_json
from tests.exports import export_quietly
from tests.made_once import made_once

SOURCES = (
    "The house is small and the garden is large.",
    "She reads a book about rivers, stones and birds.",
    "We went to the market on Monday morning.",
)
TARGETS = (
    "Das Haus ist klein und der Garten ist groß.",
    "Sie liest ein Buch über Flüsse, Steine und Vögel.",
    "Wir gingen am Montagmorgen auf den Markt.",
)
TEXTS = (
    *SOURCES,
    *TARGETS,
    ">>deu<< The house",
    "The >>deu<< house",
    ">>deu<<>>deu<< The",
    "the  birds </s> and <pad>",
    "日本 the 日",
)


def pieces_of(file: Path, texts: tuple[str, ...], kind: str = "unigram") -> list[str]:
    """The pieces of a model that is trained on some texts and written to a file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5),
        model_writer=model,
        vocab_size=100,
        model_type=kind,
        hard_vocab_limit=False,
        bos_id=-1,
        eos_id=0,
        unk_id=1,
        minloglevel=2,
    )
    file.write_bytes(model.getvalue())
    known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [known.id_to_piece(index) for index in range(known.vocab_size())]


def with_marian_files(folder: Path, kind: str = "unigram", separate: bool = False) -> Path:
    """A folder with the files of OPUS-MT; a piece of the sources is missing in the vocabulary."""
    folder.mkdir(exist_ok=True)
    source = pieces_of(folder / "source.spm", SOURCES, kind)
    target = pieces_of(folder / "target.spm", TARGETS, kind)
    source.remove("w")

    def write(name: str, pieces: list[str]) -> None:
        ids = {piece: i for i, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *pieces]))}
        ids |= {token: len(ids) + i for i, token in enumerate((">>deu<<", "<pad>"))}
        (folder / name).write_text(json.dumps(ids))

    write("vocab.json", source if separate else [*source, *target])
    if separate:
        write("target_vocab.json", target)
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("separate", [False, True])
def test_ids_and_texts_are_those_of_transformers(separate, tmp_path):
    folder = with_marian_files(tmp_path / "marian", separate=separate)
    write_source_tokenizer(folder, tmp_path, 300, TEXTS)
    assert (tmp_path / "source_tokenizer.json").is_file()


def test_other_scores_are_seen(tmp_path):
    """The splitter of targets is swapped with that of sources."""
    folder = with_marian_files(tmp_path / "marian")
    write_source_tokenizer(folder, tmp_path, 300, SOURCES)
    written = (tmp_path / "source_tokenizer.json").read_text()
    (folder / "source.spm").write_bytes((folder / "target.spm").read_bytes())
    write_source_tokenizer(folder, tmp_path, 300, SOURCES)
    assert (tmp_path / "source_tokenizer.json").read_text() != written


def test_another_kind_of_model_is_refused(tmp_path):
    folder = with_marian_files(tmp_path / "marian", kind="bpe")
    with pytest.raises(ExportError, match="of type BPE, expected Unigram"):
        write_source_tokenizer(folder, tmp_path, 300, TEXTS)


def test_a_vocabulary_with_gaps_is_refused(tmp_path):
    folder = with_marian_files(tmp_path / "marian")
    edit_json(folder / "vocab.json", another=500)
    with pytest.raises(ExportError, match="expected one for each id from 0 on"):
        write_source_tokenizer(folder, tmp_path, 300, TEXTS)


@pytest.fixture(scope="module")
def exported(captures, tmp_path_factory):
    def make(folder: Path) -> Path:
        target = write_family_checkpoint("marian", folder / "marian")
        with_marian_files(target)
        with quiet_libraries():
            export_quietly(captures, folder / "bundle", target)
        return folder

    return made_once(tmp_path_factory, "marian-files", make)


def test_a_translation_of_text_is_that_of_transformers(exported):
    folder = exported / "marian"
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = MarianTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    without_pieces = list(range(len(tokenizer), 300))
    options = {"max_new_tokens": 12, "num_beams": 4, "suppress_tokens": without_pieces}
    with dsbd_ort.Pipeline.from_bundle(exported / "bundle", num_threads=1) as pipe:
        for text in (*SOURCES, ">>deu<< The house", "The >>deu<< house", "we went west"):
            with quiet_libraries(), torch.no_grad():
                inputs = tokenizer(text, return_tensors="pt")
                wanted = model.generate(**inputs, **options)[0].tolist()
            found = pipe.translate(text, **options).sequences[0]
            assert found.token_ids == wanted[1:]
            said = tokenizer.decode(wanted, skip_special_tokens=True, use_source_tokenizer=False)
            assert found.text.strip() == said


UNKNOWN = [">>xyz<< The house", "  >>de<< The house", ">>DEU<<The house", ">>deu_Latn<<"]


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_source_that_begins_with_an_unknown_code_is_refused(exported, text):
    code = text.split()[0].partition("The")[0]
    words = f"the source begins with {code}, a code that this model lacks; it"
    with dsbd_ort.Pipeline.from_bundle(exported / "bundle", num_threads=1) as pipe:
        with pytest.raises(InputError, match=rf"{words} has >>deu<<$"):
            pipe.translate(text, max_new_tokens=2)


def test_codes_of_a_model_that_has_none_and_of_one_that_has_many(tmp_path):
    def written(name: str, codes: list[str]) -> Tokenizer:
        folder = with_marian_files(tmp_path / name)
        ids = json.loads((folder / "vocab.json").read_text())
        names = [piece for piece in ids if piece != ">>deu<<"] + codes
        (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(names)}))
        write_source_tokenizer(folder, folder, 300, SOURCES)
        return Tokenizer(folder, bos_token_id=None, file="source_tokenizer.json")

    with pytest.raises(
        InputError, match="a code that this model lacks; it has none: leave the code out"
    ):
        written("none", []).encode(">>deu<< The house")
    many = written("many", [f">>{a}{b}<<" for a in "abcde" for b in "uvwxyz"])
    with pytest.raises(InputError, match=r"it has >>au<<, .* and 18 more$"):
        many.encode(">>aus<< The house")
    assert many.encode(">>bz<< The")[1:] == many.encode("The")
