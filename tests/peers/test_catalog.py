"""The table of tools is sound: every ratio and every bar has a counterpart."""

from __future__ import annotations

import pytest

from dsbd_ort.decoding import DecodingConfig
from peers.catalog import OURS, PEERS, TORCH
from peers.prepare import RUNNERS
from peers.summary import BARS

OUR_RUNS = {
    (run.name, run.precision): run for peer in PEERS if peer.name == OURS for run in peer.runs
}
KEYS = {(peer.name, run.name, run.precision) for peer in PEERS for run in peer.runs}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_runners_counterparts_and_names(peer):
    assert (RUNNERS / f"{peer.runner}.py").is_file()
    assert len({(run.name, run.precision) for run in peer.runs}) == len(peer.runs)
    for run in peer.runs:
        for name in (run.counterpart, run.same_tokens_as):
            assert name is None or (name, run.precision) in OUR_RUNS


def test_our_runs_are_configurations():
    configs = {key: DecodingConfig.from_options(dict(run.options)) for key, run in OUR_RUNS.items()}
    for (name, _), config in configs.items():
        assert config.num_beams == (4 if "W=4" in name else 1)
        assert (config.width_policy == "threshold") == ("at least" in name)


def test_bars_name_rows():
    for bar in BARS:
        assert (bar.peer, bar.run, bar.precision) in KEYS
        assert (bar.ours, bar.precision) in OUR_RUNS


def test_torch_is_pinned_first_and_stays():
    for peer in PEERS:
        calls = [words for words in peer.installs if "--no-deps" not in words]
        assert all(TORCH in words for words in calls)
