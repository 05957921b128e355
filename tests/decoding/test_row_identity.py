"""Rows are a function of source and tokens: other sources share none, even with equal tokens."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult, LateSource, Source
from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import DecodingConfig, DecodingRequest, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.engine_call import EngineCall, Meter, forward_groups
from dsbd_ort.decoding.kv_cache import RowIdentity
from dsbd_ort.decoding.whole_requests import decoded_together
from tests.decoding.tables import (
    all_tokens,
    decoded,
    decoded_next,
    outcomes,
    random_table,
    request_on,
)

VOCAB = 8
TABLES = {"a": random_table(1, VOCAB), "b": random_table(2, VOCAB), None: random_table(3, VOCAB)}
PROMPT = (1, 2, 3, 4, 5)
CONFIG = DecodingConfig(strategy="beam-sample", num_beams=2, max_new_tokens=6)


class Sourced(TableModel):
    """A model whose logits depend on the source as well, which it keeps with every row."""

    def __init__(self) -> None:
        super().__init__(VOCAB, lambda path: self.table(path))
        self.sources: list[Source] = []
        self.num_computed = 0

    def forward(self, forward: Forward) -> ForwardResult:
        self.table = TABLES[forward.source]
        self.sources += [forward.source] * forward.num_new
        self.num_computed += forward.num_new
        for seen in forward.mask:
            assert {self.sources[row] for row in seen.nonzero()[0]} == {forward.source}
        return super().forward(forward)

    def keep(self, rows: np.ndarray) -> None:
        super().keep(rows)
        self.sources = [self.sources[row] for row in rows.tolist()]


class Joining(Sourced):
    """The same; one forward may have rows of several sources.

    Attributes:
        num_forwards: so far.
        released: sources, in the order of their release.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, joins_sources=True)
        self.num_forwards = 0
        self.released: list[Source] = []

    def forward(self, forward: Forward) -> ForwardResult:
        """Compute one row at a time, by the table of its own source."""
        self.num_forwards += 1
        sources = forward.row_sources
        row_of = {row: place for place, row in enumerate(forward.logit_rows.tolist())}
        values = np.zeros((len(row_of), VOCAB), np.float32)
        for row, number in enumerate(sources.index.tolist()):
            part = replace(forward.part(row, row + 1), source=sources.distinct[number])
            assert part.sources is None
            assert part.source == sources.distinct[number]
            found = super().forward(part)
            if row in row_of:
                values[row_of[row]] = found.logits.values[0]
        return ForwardResult(DenseLogits(values))

    def read_source(self, source: Source) -> None:
        if source == "unreadable":
            raise ValueError("nobody can read it")

    def release_source(self, source: Source) -> None:
        self.released.append(source)


def request_of(source: Source, seed: int) -> DecodingRequest:
    return request_on(CONFIG, PROMPT, seed, source=source)


def alone(source: Source, seed: int) -> list[tuple[list[int], float]]:
    return all_tokens(decoded(request_of(source, seed), Sourced()))


def check_together(model: Sourced) -> None:
    asked = [(source, seed) for seed in range(3) for source in ("a", "b", None, "a")]
    requests = [request_of(*each) for each in asked]
    results = decoded_together(BatchedDecoder(model, None), requests, len(requests))
    for each, result in zip(asked, results, strict=True):
        assert all_tokens(result) == alone(*each), each


def test_requests_of_other_sources_run_together_as_they_do_alone() -> None:
    check_together(Sourced())


def test_the_prompt_is_computed_once_for_each_source() -> None:
    model = Sourced()
    decoder = BatchedDecoder(model, None)
    for source in ("a", "a", "b"):
        decoder.join(request_of(source, 0))
    decoder.iterate()
    assert model.num_computed == 2 * (len(PROMPT) - 1)


def test_a_prefix_of_another_source_is_not_reused() -> None:
    decoder = BatchedDecoder(Sourced(), None)
    for source, seed in (("a", 0), ("b", 1), ("b", 2), ("a", 3)):
        result = decoded_next(decoder, request_of(source, seed))
        assert all_tokens(result) == alone(source, seed), (source, seed)


def test_requests_of_several_sources_share_forwards_of_an_engine_that_joins_them() -> None:
    """Every one as alone; as many forwards as the longest request needs, not as all do."""
    together = Joining()
    check_together(together)
    assert together.num_forwards <= CONFIG.max_new_tokens + 1
    assert set(together.released) == {"a", "b", None}


class ReadingInCalls(Joining):
    """Its calls read sources, and return which of them nobody can read."""

    def read_source(self, source: Source) -> None:
        """Do nothing."""

    def forward(self, forward: Forward) -> ForwardResult:
        failed, error = dict[Source, Exception](), ValueError("nobody can read it")
        if forward.source == "unreadable":
            raise error
        if forward.sources is not None and "unreadable" in forward.sources.distinct:
            failed["unreadable"] = error
            read = tuple("a" if each in failed else each for each in forward.sources.distinct)
            forward = replace(forward, sources=replace(forward.sources, distinct=read))
        return replace(super().forward(forward), failed=failed or None)


@pytest.mark.parametrize("kind", [Joining, ReadingInCalls])
def test_a_source_that_cannot_be_read_ends_its_own_requests_alone(kind: type[Joining]) -> None:
    model = kind()
    decoder = BatchedDecoder(model, None)
    sources = ("a", "unreadable", "b", "unreadable")
    members = [decoder.join(request_of(source, seed)) for seed, source in enumerate(sources)]
    ended = outcomes(decoder)
    for seed, (source, member) in enumerate(zip(sources, members, strict=True)):
        if source == "unreadable":
            assert str(ended[member]) == "nobody can read it"
        else:
            assert all_tokens(ended[member]) == alone(source, seed)
    assert set(model.released) == {"a", "b", "unreadable"}


def test_a_source_is_released_with_its_last_request_preempted_ones_included() -> None:
    model = Joining()
    decoder = BatchedDecoder(model, None)
    first, second, other = (decoder.join(request_of(s, n)) for n, s in enumerate("aab"))
    decoder.iterate()
    decoder.preempt(second)
    decoder.leave(first)
    assert model.released == []
    decoder.leave(other)
    assert model.released == ["b"]
    decoder.resume(second)
    decoder.iterate()
    assert model.released == ["b"]
    decoder.leave(second)
    decoder.leave(second)
    assert model.released == ["b", "a"]


class Late(LateSource):
    """A source that the rows from a place on depend on."""

    def __init__(self, place: int, name: str) -> None:
        self.place, self.name = place, name

    def num_alike(self, other: Source) -> int:
        return min(self.place, other.place) if isinstance(other, Late) else self.place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Late) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.name)


LATE_TABLES = {Late(2, "x"): random_table(4, VOCAB), Late(3, "y"): random_table(5, VOCAB)}


class LateSourced(Sourced):
    """Its logits depend on a late source from its place on; rows know the source they have."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, joins_sources=True)

    def forward(self, forward: Forward) -> ForwardResult:
        source = forward.source
        tables = {**LATE_TABLES, None: TABLES[None]}

        def table(path: tuple[int, ...]) -> np.ndarray:
            is_text = source is None or len(path) <= source.place
            return tables[None if is_text else source](path)

        self.table = table
        self.num_computed += forward.num_new
        first = len(self.sources)
        for row in range(forward.num_new):
            is_text = source is None or forward.positions[row] < source.place
            self.sources.append(None if is_text else source)
            seen = forward.mask[row, :first].nonzero()[0]
            assert {self.sources[each] for each in seen} <= {None, source}
        return TableModel.forward(self, forward)

    def read_source(self, source: Source) -> None:
        """Do nothing."""

    def release_source(self, source: Source) -> None:
        """Do nothing."""


@pytest.mark.parametrize("order", [(0, 1, 2, 0), (2, 1, 0, 2), (1, 0, 1, 2)])
def test_rows_before_a_late_source_are_shared_and_results_are_those_alone(order) -> None:
    """Prompts of 4 rows to keep: one of text, others with a source from row 2 or 3 on."""
    known = (Late(2, "x"), Late(3, "y"), None)
    sources = [known[number] for number in order]
    alone = [
        all_tokens(decoded(request_of(source, seed), LateSourced()))
        for seed, source in enumerate(sources)
    ]
    decoder = BatchedDecoder(LateSourced(), None)
    for seed, source in enumerate(sources):
        result = decoded_next(decoder, request_of(source, seed))
        assert all_tokens(result) == alone[seed]
    shared = LateSourced()
    decoder = BatchedDecoder(shared, None)
    for seed, source in enumerate(sources):
        (result,) = decoded_together(decoder, [request_of(source, seed)], 1)
        assert all_tokens(result) == alone[seed]


def test_only_rows_that_depend_on_a_late_source_are_computed_again() -> None:
    model = LateSourced()
    decoder = BatchedDecoder(model, None)
    counts = []
    for source in (Late(2, "x"), Late(3, "y"), None, Late(2, "x")):
        before = model.num_computed
        member = decoder.join(request_of(source, 0))
        decoder.iterate()
        decoder.leave(member)
        counts.append(model.num_computed - before)
    # Of the prompt's 4 rows 2 are shared with the first, 3 with the second; at last all of them
    # are, and the first iteration computes the row of the last token.
    assert counts == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("ours", "theirs", "num_common"),
    [
        (([1, 2, 3], Late(2, "x")), ([1, 2, 3], Late(2, "x")), 3),
        (([1, 2, 3], Late(2, "x")), ([1, 2, 3], Late(1, "x")), 1),
        (([1, 2, 3], Late(2, "x")), ([1, 2, 3], None), 2),
        (([1, 2, 3], None), ([1, 2, 3], Late(0, "x")), 0),
        (([1, 2, 3], Late(2, "x")), ([1, 4, 3], None), 1),
        (([1, 2, 3], Late(2, "x")), ([1, 2, 3], "a"), 2),
        (([1, 2, 3], None), ([1, 2, 4], None), 2),
        (([1, 2, 3], "a"), ([1, 2, 3], "a"), 3),
        (([1, 2, 3], "a"), ([1, 2, 3], "b"), 0),
        (([1, 2, 3], "a"), ([1, 2, 3], None), 0),
        (([], "a"), ([1], "a"), 0),
    ],
)
def test_common_rows(ours, theirs, num_common) -> None:
    assert RowIdentity(*ours).num_common(RowIdentity(*theirs)) == num_common


GROUPS: list[tuple[str, list[str], list[str]]] = [
    # calls by their source, None in lower case; the forwards that they share, and those of an
    # engine that joins sources
    ("aaa", ["aaa"], ["aaa"]),
    ("aAaA", ["aa", "AA"], ["aAaA"]),
    ("AaBA", ["AA", "a", "B"], ["AaBA"]),
]


@pytest.mark.parametrize(("calls", "apart", "joined"), GROUPS)
def test_calls_share_a_forward_by_their_source(calls, apart, joined) -> None:
    def call_of(letter: str) -> EngineCall:
        source = letter if letter.isupper() else None
        return EngineCall("target", Meter(), 1, lambda first_row: None, source)  # type: ignore[arg-type, return-value]

    made = [call_of(letter) for letter in calls]
    letter_by_call = dict(zip(made, calls, strict=True))
    for joins, expected in ((False, apart), (True, joined)):
        groups = forward_groups(made, joins_sources=joins)
        assert ["".join(letter_by_call[call] for call in group) for group in groups] == expected
