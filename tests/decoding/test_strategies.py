"""Properties of every strategy: log-probabilities add up, statistics agree, also summed."""

import dataclasses
import itertools

import numpy as np
import pytest

from dsbd_forward.forward import SourceReading
from dsbd_ort.decoding import (
    STRATEGIES,
    DecodingConfig,
    DecodingRequest,
    DecodingStats,
    TableModel,
    decode,
    decode_iterations,
    result_of,
)
from dsbd_ort.decoding.stats import summed_stats
from tests.benchmark.fakes import stats
from tests.decoding.tables import all_tokens, mixed_table, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 6
TARGET = random_table(41, VOCAB)
DRAFT = mixed_table(TARGET, random_table(42, VOCAB), 0.7)
PROMPT = (1, 0, 1)

VARIANTS = [
    *({"strategy": name} for name in STRATEGIES),
    {"strategy": "dsbd", "width_policy": "fixed"},
    {"strategy": "dsbd", "memory": "single"},
    {"strategy": "dsbd", "coupling": "rejection"},
    {"strategy": "dsbd", "coupling": "rejection", "width_policy": "fixed", "replacement": True},
    {"strategy": "dsbd", "replacement": True},
    {"strategy": "speculative", "coupling": "rejection"},
    {"strategy": "tree-speculative", "coupling": "rejection"},
    {"strategy": "beam-sample", "coupling": "rejection"},
    {
        "strategy": "dsbd",
        "width_policy": "threshold",
        "draft_length": 3,
        "draft_beams": (8, 4, 2),
    },
    {"strategy": "mjsd", "temperature": 0.0},
]
VARIANT_NAMES = ["-".join(str(value) for value in variant.values()) for variant in VARIANTS]

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)


def outcome(seed, **options):
    config = DecodingConfig(**({"max_new_tokens": 12, "eos_token_id": 5} | options))
    return run(config, TARGET, DRAFT if config.row.has_draft else None, VOCAB, seed, PROMPT)


def teacher_forced(tokens):
    logprobs, path = [], PROMPT
    for token in tokens:
        logits = TARGET(path)
        logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
        path = (*path, token)
    return logprobs


@every_variant
def test_log_probabilities_add_up_to_a_teacher_forced_pass(variant):
    for seed in range(10):
        for sequence in outcome(seed, **variant).sequences:
            expected = teacher_forced(sequence.token_ids)
            assert sequence.token_logprobs == pytest.approx(expected, abs=1e-4)
            assert sequence.logprob == pytest.approx(sum(sequence.token_logprobs))


@every_variant
def test_statistics_obey_their_identities(variant):
    for seed in range(10):
        stats = outcome(seed, **variant).stats
        histogram = stats.acceptance_histogram
        assert sum(histogram) == stats.num_iterations
        assert sum(j * n for j, n in enumerate(histogram)) == stats.num_accepted_layers
        steps, accepted = stats.num_iterations, stats.num_accepted_layers
        assert stats.mean_acceptance_length == pytest.approx(1 + accepted / steps)
        if stats.num_draft_tokens:
            rate = stats.num_accepted_tokens / stats.num_draft_tokens
            assert stats.draft_acceptance_rate == rate <= 1.0
        assert stats.num_accepted_layers <= stats.num_accepted_tokens or stats.num_draft_layers == 0
        assert stats.num_draft_layers <= stats.num_draft_tokens
        assert (stats.draft_calls > 0) == (stats.draft_rows > 0)
        assert 0 < stats.time_to_first_token_s <= stats.target_s + stats.draft_s + stats.host_s


class TimedModel(TableModel):
    """A model whose runtime takes a second a call, after the reading of a source if it has one."""

    reading = None

    def forward(self, forward):
        return dataclasses.replace(super().forward(forward), run_s=1.0, reading=self.reading)


def test_time_around_an_engine_s_run_is_the_host_s_and_that_of_an_encoder_is_the_engine_s():
    ticks = itertools.count()
    for reading, seconds in ((None, 1.0), (SourceReading(3, 0.25, 0.25), 1.25)):
        model = TimedModel(VOCAB, TARGET)
        model.reading = reading
        request = DecodingRequest(
            prompt_ids=PROMPT,
            config=DecodingConfig(strategy="sample", max_new_tokens=5),
            rng=np.random.default_rng(0),
            clock=lambda: 10.0 * next(ticks),
        )
        found = result_of(decode_iterations(request, model, None)).stats
        assert found.target_s == seconds * found.target_calls
        assert found.host_s == pytest.approx(
            found.num_output_tokens / found.tokens_per_s - found.target_s
        )
        assert found.host_s > 8.0 * found.target_calls


def test_replacement_returns_repeats_and_equals_beam_sample():
    common = {"num_beams": 3, "num_return_sequences": 3, "replacement": True, "temperature": 0.3}
    has_repeat = False
    for seed in range(30):
        plain = outcome(seed, strategy="beam-sample", **common)
        fixed = outcome(seed, strategy="dsbd", width_policy="fixed", **common)
        assert all_tokens(plain) == all_tokens(fixed) and len(plain.sequences) == 3
        tokens = [tuple(sequence.token_ids) for sequence in plain.sequences]
        has_repeat |= len(set(tokens)) < 3
    assert has_repeat


FIRST = stats(
    num_iterations=3,
    num_accepted_layers=3,
    num_draft_tokens=10,
    num_accepted_tokens=4,
    acceptance_histogram=[1, 1, 1],
    mean_beam_width=2.0,
    num_output_tokens=6,
    target_s=1.0,
    draft_s=0.5,
    host_s=0.5,
    time_to_first_token_s=0.25,
    kv_bytes_peak=100,
)
SECOND = dataclasses.replace(
    FIRST,
    num_iterations=4,
    num_accepted_layers=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    acceptance_histogram=[4],
    mean_beam_width=1.0,
    num_output_tokens=4,
    target_s=2.0,
    time_to_first_token_s=9.0,
    kv_bytes_peak=300,
)


def test_one_is_itself() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, 8)).astype(np.float32)
    model = TableModel(8, lambda path: table[path[-1]])
    config = DecodingConfig(num_beams=2, draft_length=2, max_new_tokens=6)
    one = decode(model, TableModel(8, lambda path: table[path[-1]]), [1], config, rng).stats
    for name, value in dataclasses.asdict(summed_stats([one])).items():
        assert value == pytest.approx(getattr(one, name)), name


def test_rates_are_those_of_the_sums() -> None:
    both = summed_stats([FIRST, SECOND])
    assert (both.num_iterations, both.num_output_tokens) == (7, 10)
    assert both.mean_acceptance_length == pytest.approx(1 + 3 / 7)
    assert both.draft_acceptance_rate == pytest.approx(0.4)
    assert both.acceptance_histogram == [5, 1, 1]
    assert both.mean_beam_width == pytest.approx((6 * 2.0 + 4 * 1.0) / 10)
    assert both.time_to_first_token_s == 0.25
    assert both.tokens_per_s == pytest.approx(10 / 5.0)
    assert both.time_per_output_token_s == pytest.approx((5.0 - 0.25) / 9)
    assert both.kv_bytes_peak == 300


@pytest.mark.parametrize(("max_new_tokens", "drafter"), [(1, "none"), (6, "model")])
def test_a_request_that_drafted_nothing_names_no_drafter(max_new_tokens: int, drafter: str) -> None:
    config = DecodingConfig(num_beams=2, draft_length=2, max_new_tokens=max_new_tokens)
    models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    one = decode(*models, PROMPT, config, np.random.default_rng(0)).stats
    assert (one.drafter, one.num_draft_layers > 0) == (drafter, drafter == "model")
    drafted = dataclasses.replace(one, drafter="model")
    assert summed_stats([dataclasses.replace(one, drafter="none"), drafted]).drafter == "model"


def test_every_field_is_counted() -> None:
    """A statistic that is added must be summed, too."""
    changed = {field.name for field in dataclasses.fields(DecodingStats)}
    assert set(dataclasses.asdict(summed_stats([FIRST]))) == changed
