"""The whole loop over two fake devices: the tokens of the CPU, few copies, nothing allocated."""

import numpy as np
import pytest

from dsbd_ort.decoding import STRATEGIES, DecodingConfig, decode
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import InputError, ProviderError
from dsbd_runtime.loading import load_pair
from tests.runtime.fake_device import open_on_fake
from tests.runtime.model_calls import ONE_THREAD
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

NUM_SMALL_ARRAYS = 6  # ids, positions, mask, write index, logit rows; logits
NUM_FRESH_STARTS = 2  # all rows are dropped before a request and at its end
PROMPT = [72, 101, 108, 108, 111]
COUNTED = ("num_iterations", "target_calls", "target_rows", "draft_calls", "draft_rows")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The draft is the target without its last layer: it is accepted now and then."""
    path = tmp_path_factory.mktemp("device") / "bundle"
    return open_bundle(write_tiny_bundle(path, target=TinyModel(), draft=TinyModel(num_layers=1)))


@pytest.fixture(scope="module")
def on_host(bundle):
    target, draft = load_pair(bundle, settings=ONE_THREAD)
    with target, draft:
        yield target, draft


def generate(target, draft, seed, **options):
    config = DecodingConfig(max_new_tokens=24, seed=seed, **options)
    for model in (target, draft):
        model.keep(np.arange(0))
    uses_draft = draft if config.row.has_draft else None
    return decode(target, uses_draft, PROMPT, config, np.random.default_rng(seed))


VARIANTS = [
    *({"strategy": name} for name in STRATEGIES),
    {"strategy": "dsbd", "width_policy": "fixed", "num_beams": 6},
    {"strategy": "dsbd", "memory": "single"},
    {"strategy": "dsbd", "coupling": "rejection"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("most_recorded", [0, 64])
def test_every_strategy_gives_the_tokens_of_the_cpu(bundle, on_host, options, most_recorded):
    machines = [
        open_on_fake(
            bundle,
            role,
            most_recorded=most_recorded,
            is_poisoned=True,
        )
        for role in ("target", "draft")
    ]
    with machines[0].model as target, machines[1].model as draft:
        for seed in range(3):
            found = generate(target, draft, seed, **options)
            wanted = generate(*on_host, seed, **options)
            assert [s.token_ids for s in found.sequences] == [s.token_ids for s in wanted.sequences]
            for name in COUNTED:
                assert getattr(found.stats, name) == getattr(wanted.stats, name)
    assert not any(machine.device.live for machine in machines)


def test_a_request_copies_once_in_and_once_out_a_call_and_allocates_nothing(bundle):
    machines = [open_on_fake(bundle, role) for role in ("target", "draft")]
    models = [machine.model for machine in machines]
    generate(*models, seed=1)  # every size of call, once
    for machine in machines:
        machine.device.traffic.clear()
    stats = generate(*models, seed=1).stats
    assert stats.num_iterations >= 5
    for machine, num_steps in zip(machines, (stats.target_calls, stats.draft_calls), strict=True):
        check_traffic(machine, num_steps, stats.num_iterations)


def check_traffic(machine, num_steps, num_iterations):
    counts, num_bytes = machine.device.traffic.counts, machine.device.traffic.num_bytes
    num_moves = counts["call"] - num_steps
    assert 0 < num_moves <= num_iterations + 1
    assert counts["upload"] == counts["call"]
    assert num_steps <= counts["synchronize"] <= num_steps + 2  # a prune after a prune waits
    assert num_steps - 1 <= counts["download"] <= num_steps  # the prompt's rows have no logits
    num_caches = len(machine.engine.bound[0]) - NUM_SMALL_ARRAYS
    assert counts["fill_zero"] == NUM_FRESH_STARTS * num_caches // 2  # each is bound in and out
    assert not {"allocate", "allocate_pinned", "copy_rows"} & set(counts)
    largest_step = 32 * machine.session.rows.capacity + 8 * (2 * 32 + 32 + 1) + 4 * 256
    assert num_bytes["upload"] <= counts["upload"] * largest_step
    assert num_bytes["upload"] < counts["upload"] * machine.session.rows.num_bytes


def test_the_pipeline_hands_every_setting_on(bundle):
    with pytest.raises(InputError, match="cuda_graphs is set, but provider 'cpu' has none"):
        Pipeline.from_bundle(bundle.path, cuda_graphs=True)
    with pytest.raises(ProviderError, match="provider 'cuda:x' names the device 'x'"):
        Pipeline.from_bundle(bundle.path, draft_provider="cuda:x")


def test_where_calls_are_recorded_a_request_grows_its_caches_once_at_its_start(bundle):
    machines = [open_on_fake(bundle, role, most_recorded=64) for role in ("target", "draft")]
    models = [machine.model for machine in machines]
    config = DecodingConfig(max_new_tokens=180, seed=1, strategy="dsbd")
    decode(*models, PROMPT * 20, config, np.random.default_rng(1))
    for machine in machines:
        assert machine.device.traffic.counts["copy_rows"] == 0  # grown while it was empty
        assert machine.session.rows.capacity >= 100 + 180
        assert len(machine.session.caches.recorded) > 0
        machine.device.traffic.clear()
    again = [machine.session.rows.capacity for machine in machines]
    decode(*models, PROMPT * 20, config, np.random.default_rng(2))
    assert [machine.session.rows.capacity for machine in machines] == again
