"""Bundles whose draft shares the target's encoder: drafted is plain, a source is read once."""

import re
import shutil
from collections import Counter

import numpy as np
import pytest

import dsbd_ort
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError
from dsbd_runtime.loading import load_causal_lm, load_pair
from dsbd_runtime.parts.source.sources import Sources
from scripts.family_checkpoints import write_family_checkpoint
from tests.encoder_decoder_pair import some_sources, with_defaults
from tests.export.cut_decoders import cut_decoder
from tests.exports import export_quietly
from tests.made_once import made_once
from tests.runtime.bundle_edits import edited
from tests.test_encoder_decoder_bundle import SAMPLING, SEARCHES, check_equal
from tests.test_shared_sources import tokens


@pytest.fixture(scope="session")
def pair(captures, tmp_path_factory):
    """Marian, drafted by its encoder and the first layer of its decoder."""

    def exported(folder):
        target = with_defaults(write_family_checkpoint("marian", folder / "marian"))
        draft = cut_decoder(target, folder / "draft")
        export_quietly(captures, folder / "bundle", target, draft)
        return folder

    return made_once(tmp_path_factory, "shared-encoder", exported)


@pytest.fixture(scope="session")
def pipe(pair):
    with dsbd_ort.Pipeline.from_bundle(pair / "bundle", num_threads=1) as opened:
        yield opened


def test_drafted_searches_are_those_of_transformers(pipe, pair):
    num_drafted = 0
    for index, source in enumerate(some_sources(6)):
        for options in SEARCHES if index < 2 else SEARCHES[:2]:
            check_equal(pipe, pair / "marian", source, **options)
        num_drafted += pipe.generate(source, draft_length=3).stats.num_draft_tokens
    assert num_drafted > 0


@pytest.mark.parametrize(("plain", "drafted", "options"), SAMPLING)
def test_drafted_samples_are_the_plain_ones(plain, drafted, options, pipe):
    sources = some_sources(6)
    wanted = [pipe.generate(s, strategy=plain, seed=i, **options) for i, s in enumerate(sources)]
    for seed, source in enumerate(sources):
        found = pipe.generate(source, strategy=drafted, seed=seed, draft_length=3, **options)
        assert found.stats.num_draft_tokens > 0
        assert tokens(found) == tokens(wanted[seed])
    together = pipe.generate(sources, strategy=drafted, seed=0, draft_length=3, **options)
    assert tokens(together[0]) == tokens(wanted[0])


class CountingEngine:
    """An engine whose calls are counted by its name."""

    def __init__(self, engine, name, calls):
        self._engine, self._name, self._calls = engine, name, calls

    def run_with_ort_values(self, *arguments):
        self._calls[self._name] += 1
        return self._engine.run_with_ort_values(*arguments)


def test_a_source_is_read_once_for_both(pair):
    calls = Counter()
    with dsbd_ort.Pipeline.from_bundle(pair / "bundle", num_threads=1) as pipe:
        with pipe.models.engines() as models:
            for name, model in zip(("target", "draft"), models, strict=True):
                encoder = model.part(Sources).encoder
                encoder._engine = CountingEngine(encoder._engine, name, calls)
        sources = some_sources(4)
        for source in sources:
            pipe.generate(source, draft_length=3)
        assert calls == {"target": 4, "draft": 4}
        pipe.generate(sources, draft_length=3)
        assert calls == {"target": 8, "draft": 8}
        pipe.generate(sources[0], strategy="beam-search")
        assert calls == {"target": 9, "draft": 8}  # nothing is projected without need


def test_a_draft_that_is_opened_alone_reads_sources_itself(pair):
    bundle = open_bundle(pair / "bundle")
    source = (5, 6, 7, 1)
    alone = load_causal_lm(bundle, "draft", settings=EngineSettings(num_threads=1))
    target, with_own = load_pair(bundle, settings=EngineSettings(num_threads=1))
    with alone, target, with_own:
        found, wanted = (
            each.part(Sources).encoder.cross_rows(source) for each in (alone, with_own)
        )
        for name, value in found.values.items():
            assert np.array_equal(value.numpy(), wanted.values[name].numpy())
        assert found.num_bytes == wanted.num_bytes == 2 * 4 * 8 * 4 * len(source)
        # The target's rows of three layers, and the hidden states.
        assert target.kv_bytes - with_own.kv_bytes >= (768 + 32 * 4 - 256) * len(source)


CONTRADICTIONS = [  # (role, field of its encoder, value, words)
    ("draft", "hidden_width", 64, "hidden_width is 64, expected 32, that of the target"),
    ("draft", "hidden_width", 0, "hidden_width is 0, expected a number above 0"),
    ("draft", "context_length", 128, "context_length is 128, expected 256, that of the target"),
    ("target", "hidden_width", None, "whose encoder returns no hidden states"),
    ("target", "is_shared", True, "target: encoder: is_shared is True, expected null"),
    ("draft", "is_shared", None, "lacks the input source_ids"),
]


@pytest.mark.parametrize(("role", "field", "value", "words"), CONTRADICTIONS)
def test_contradictions_are_refused(role, field, value, words, pair, tmp_path):
    def edit(data):
        data[role]["encoder"][field] = value

    shutil.copytree(pair / "bundle", tmp_path / "bundle")
    with pytest.raises(BundleError, match=re.escape(words)):
        dsbd_ort.Pipeline.from_bundle(edited(tmp_path / "bundle", edit))
