"""The tables of tools and those of their results: every ratio and every bar has a counterpart."""

import json
import re

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsbd_ort.decoding import DecodingConfig
from lab.peers.catalog import OURS, TORCH
from lab.peers.comparison import COMPARISONS, STRATEGIES, next_to_busy
from lab.peers.prepare import RUNNERS


def test_on_a_busy_machine_the_aim_is_to_be_no_slower():
    quiet = COMPARISONS[STRATEGIES]
    busy = next_to_busy(quiet)
    assert (quiet.section, busy.section) == ("peers", "peers, busy")
    assert {bar.aim for bar in busy.bars} == {1.0} and len(busy.bars) == len(quiet.bars) > 0


CASES = [(comparison, peer) for comparison in COMPARISONS.values() for peer in comparison.peers]
IDS = [f"{comparison.name}-{peer.name}" for comparison, peer in CASES]
every_tool = pytest.mark.parametrize(("comparison", "peer"), CASES, ids=IDS)
every_comparison = pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)


def our_runs(comparison):
    (ours,) = (peer for peer in comparison.peers if peer.name == OURS)
    return {(run.name, run.precision): run for run in ours.runs}


@every_tool
def test_runners_counterparts_and_names(comparison, peer):
    ours = our_runs(comparison)
    own = {(run.name, run.precision) for run in peer.runs}
    assert len(own) == len(peer.runs)
    for run in peer.runs:
        assert run.unable is not None or (RUNNERS / f"{peer.runner}.py").is_file()
        for name in (run.counterpart, run.same_tokens_as):
            assert name is None or (name, run.precision) in ours
        assert run.undrafted is None or (run.undrafted, run.precision) in own


@every_comparison
def test_our_runs_are_configurations(comparison):
    for (name, _), run in our_runs(comparison).items():
        config = DecodingConfig(**dict(run.options))
        width = int((re.findall(r"W=(\d+)", name) or [1])[0])
        assert config.num_beams == width
        assert (config.width_policy == "threshold") == ("at least" in name)


def test_bars_name_rows():
    comparison = COMPARISONS[STRATEGIES]
    keys = {(peer.name, run.name, run.precision) for peer in comparison.peers for run in peer.runs}
    for bar in comparison.bars:
        assert (bar.peer, bar.run, bar.precision) in keys
        assert (bar.ours, bar.precision) in our_runs(comparison)


@every_tool
def test_torch_is_pinned_first_and_stays(comparison, peer):
    calls = [words for words in peer.installs if "--no-deps" not in words]
    assert all(TORCH in words for words in calls)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@every_comparison
@pytest.mark.parametrize("number", [1, 8])
def test_prompts_are_so_many_and_all_different(comparison, number):
    prompts = comparison.prompts(byte_tokenizer(), number)
    assert len(prompts) == number
    given = [*prompts, comparison.warm_up(byte_tokenizer())]
    assert len({(tuple(each.token_ids), each.json_schema) for each in given}) == number + 1
    for schema in (prompt.json_schema for prompt in prompts):
        if schema is not None:
            jsonschema.Draft202012Validator.check_schema(json.loads(schema))
