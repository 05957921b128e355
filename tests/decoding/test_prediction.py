"""A predicted text: places of paths in it, what it saves, and that the output stays the same."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingError, TableModel
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.drafting.prediction import Place, Prediction
from tests.decoding.tables import all_tokens, decoded, mixed_table, random_table, request_on, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 40
TEXT = tuple(np.random.default_rng(3).integers(0, VOCAB, 60).tolist())
EDITS = {  # an old version of TEXT
    "equal": TEXT,
    "one replaced": (*TEXT[:20], 7, *TEXT[21:]),
    "five replaced": (*TEXT[:20], 7, 7, 7, 7, 7, *TEXT[25:]),
    "one missing": (*TEXT[:20], *TEXT[21:]),
    "five missing": (*TEXT[:20], *TEXT[25:]),
    "one more": (*TEXT[:20], 7, *TEXT[20:]),
    "five more": (*TEXT[:20], 7, 7, 7, 7, 7, *TEXT[20:]),
    "halves exchanged": (*TEXT[30:], *TEXT[:30]),
}


@pytest.mark.parametrize(
    ("path", "next_places"),
    [
        ([], (0,)),
        ([1, 2], (2,)),
        ([1, 2, 9], (3, 2)),  # replaced; inserted
        ([1, 2, 4], (4, 3, 2)),  # deleted; ...
        ([1, 2, 9, 9], (4, 2)),
        ([1, 2, 9, 4], (4,)),  # replaced indeed
        ([1, 2, 9, 3], (3,)),  # inserted indeed
        ([1, 2, 4, 5], (5,)),  # deleted indeed
        ([1, 2, 3, 4, 5], (5,)),  # its end
        ([1, 2, 3, 4, 5, 1, 2], (2,)),  # twice the same: two tokens lead back
    ],
)
def test_the_next_places_after_a_path(path: list[int], next_places: tuple[int, ...]) -> None:
    prediction, place = Prediction([1, 2, 3, 4, 5]), Place()
    for end in range(1, len(path) + 1):
        place = prediction.after(place, path[:end])
    assert place.next_places == next_places
    assert sum(prediction.shares(place).values()) < 1.0


def test_a_place_far_away_needs_more_tokens_that_agree() -> None:
    prediction = Prediction([*range(100, 400)])
    place = prediction.after(Place(), [150])
    assert place.num_lost == 1  # 50 tokens away
    assert prediction.after(place, [150, 151]).next_places == (52,)
    place = prediction.after(Place(), [390])
    assert prediction.after(place, [390, 391]).num_lost == 2
    place = prediction.after(prediction.after(place, [390, 391]), [390, 391, 392])
    assert place.next_places == (293,)


def test_a_text_that_repeats_itself_is_followed_beyond_an_edit() -> None:
    """Before the edit more tokens agree than after it, and lead to it again."""
    prediction, place, num_wrong = Prediction([1, 2, 3] * 20 + [9] + [1, 2, 3] * 40), Place(), 0
    output = [1, 2, 3] * 50
    for end in range(1, len(output) + 1):
        num_wrong += output[end - 1] not in prediction.shares(place)
        place = prediction.after(place, output[:end])
    assert num_wrong == 1 and place.num_lost == 0


def test_a_token_everywhere_costs_no_more_than_a_rare_one() -> None:
    prediction = Prediction([0] * 100_000 + [1])
    place = Place()
    for _ in range(2000):  # each would be compared with all others
        place = prediction.after(place, [1, 0])
    assert place.num_lost == 0


@pytest.mark.parametrize(
    ("output", "num_repeated"),
    [
        ([1, 2, 3, 4, 5], 5),
        ([9, 9, 9], 0),
        ([1, 2, 9, 4, 5], 4),
        ([1, 2, 9, 3, 4, 5], 5),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 5),
        ([], 0),
    ],
)
def test_repeated_tokens_are_counted_once(output: list[int], num_repeated: int) -> None:
    assert Prediction([1, 2, 3, 4, 5]).num_repeated(output) == num_repeated


def writes_text(path: tuple[int, ...]) -> np.ndarray:
    """The table of a target that writes TEXT after a prompt of one token, and nearly surely so."""
    wanted = TEXT[min(len(path) - 1, len(TEXT) - 1)]
    return np.where(np.arange(VOCAB) == wanted, 9.0, np.arange(VOCAB) / VOCAB)


def written(predicted: tuple[int, ...], draft: Any = None, **options: Any) -> DecodeResult:
    given = {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 8, **options}
    given = {"draft_beams": 3, "max_new_tokens": len(TEXT), **given}
    config = DecodingConfig(predicted_token_ids=predicted, **given)
    model = TableModel(VOCAB, writes_text)
    return decoded(request_on(config, (7,)), model, draft and TableModel(VOCAB, draft))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_an_old_version_is_followed_after_its_edits(edit: str, num_beams: int) -> None:
    width = {"num_beams": num_beams, "draft_beams": 12 if num_beams > 1 else 3}
    without = written((), drafter="ngram", **width)
    result = written(EDITS[edit], drafter="ngram", **width)
    assert all_tokens(result) == all_tokens(without)
    assert result.sequences[0].token_ids == list(TEXT)
    if num_beams == 1:  # 60 tokens at 9 an iteration, and at most the lost ones of the edit
        most = 7 + (0 if edit == "equal" else 6 if edit == "five replaced" else 7)
        assert result.stats.num_iterations <= most < without.stats.num_iterations / 2


def test_the_model_drafts_only_where_the_place_is_lost() -> None:
    exact = written(TEXT, writes_text, drafter="model+ngram")
    edited = written(EDITS["five replaced"], writes_text, drafter="model+ngram")
    none = written((), writes_text, drafter="model+ngram")
    assert exact.stats.draft_calls == 0
    assert 0 < edited.stats.draft_calls < none.stats.draft_calls / 3
    assert edited.stats.num_iterations <= none.stats.num_iterations + 1


def test_a_wrong_prediction_leaves_a_good_draft_model_alone() -> None:
    """With several beams its next tokens have to come true first."""
    wrong, shape = tuple(reversed(TEXT)), {"num_beams": 4, "draft_beams": 12}
    with_wrong = written(wrong, writes_text, drafter="model+ngram", **shape)
    without = written((), writes_text, drafter="model", **shape)
    assert with_wrong.stats.num_iterations <= without.stats.num_iterations + 1


@pytest.mark.parametrize("strategy", ["speculative", "tree-speculative", "dsbd"])
def test_a_sampled_output_is_the_same_with_any_prediction(strategy: str) -> None:
    target = random_table(5, 6)
    draft = mixed_table(target, random_table(6, 6), 0.7)
    for seed in range(6):
        options = {"strategy": strategy, "seed": seed, "max_new_tokens": 20}
        plain = run(DecodingConfig(**options), target, draft, 6, seed)
        repeated = plain.sequences[0].token_ids
        for predicted in (repeated, repeated[3:], repeated[::-1]):
            config = DecodingConfig(predicted_token_ids=predicted, **options)
            assert config.settled(costs_are_known=False).drafter == "model+ngram"
            assert all_tokens(run(config, target, draft, 6, seed)) == all_tokens(plain)


def test_drafts_are_longer_if_there_is_a_prediction() -> None:
    costs = EngineCosts(CostCurve((1, 64), (2e-2, 3e-2)), CostCurve((1, 64), (1e-3, 1e-3)))
    throughput = {"drafter": "ngram", "draft_policy": "throughput", "strategy": "speculative"}
    iterations = []
    for predicted in (TEXT, EDITS["five missing"], ()):
        config = DecodingConfig(
            predicted_token_ids=predicted, max_new_tokens=60, temperature=0.01, **throughput
        )
        request = request_on(config, (7,), costs=costs)
        result = decoded(request, TableModel(VOCAB, writes_text))
        assert result.sequences[0].token_ids == list(TEXT)
        iterations.append(result.stats.num_iterations)
    assert iterations[0] <= 12 and iterations[1] <= 16 and iterations[2] > 40


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"predicted_token_ids": [99]}, "predicted_token_ids has token id 99; expected 0 to 39"),
        ({"predicted_token_ids": [1], "strategy": "sample"}, "means nothing to strategy sample"),
        ({"predicted_token_ids": [1], "drafter": "none"}, "set drafter to 'ngram' or"),
        ({"predicted_token_ids": "abc"}, "predicted_token_ids is 'abc'; expected a token id or"),
        ({"predicted_text": 5}, "predicted_text is 5; expected a text"),
        ({"predicted_text": "abc"}, "decoding sees tokens, not text; give predicted_token_ids"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DecodingError, match=said):
        config = DecodingConfig(**{"strategy": "speculative", **options})
        decoded(request_on(config, (7,)), *[TableModel(VOCAB, writes_text)] * 2)
