"""The whole loop over fake devices: the tokens of the CPU, few copies; features stay there."""

import gc

import numpy as np
import pytest

from dsbd_forward.features import ParentFeatures
from dsbd_ort.decoding import STRATEGIES, DecodingConfig, decode
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import CapacityError, InputError, ProviderError
from dsbd_runtime.loading import load_causal_lm, load_pair
from tests.runtime.fake_device import FakeDevice, open_on_fake
from tests.runtime.feature_pair import TARGET
from tests.runtime.model_calls import ONE_THREAD, chain, logits_and_features
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

NUM_SMALL_ARRAYS = 6  # ids, positions, mask, write index, logit rows; logits
NUM_FRESH_STARTS = 2  # all rows are dropped before a request and at its end
PROMPT = [72, 101, 108, 108, 111]
COUNTED = ("num_iterations", "num_accepted_tokens", "target_calls", "target_rows", "draft_calls")
COUNTED += ("draft_rows",)
NONE = np.arange(0)


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


@pytest.fixture(scope="module")
def features_on_host(feature_bundle):
    target, draft = load_pair(feature_bundle, settings=ONE_THREAD)
    with target, draft:
        yield target, draft


def generate(target, draft, seed, prompt=PROMPT, **options):
    config = DecodingConfig(**{"max_new_tokens": 24, "seed": seed, **options})
    for model in (target, draft):
        model.keep(NONE)
    uses_draft = draft if config.row.has_draft else None
    return decode(target, uses_draft, prompt, config, np.random.default_rng(seed))


def assert_same_request(fakes, on_host, seed, prompt=PROMPT, **options):
    """The tokens and the work of two engines on a fake device are those of two on the CPU."""
    found = generate(*fakes, seed, prompt, **options)
    wanted = generate(*on_host, seed, prompt, **options)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in wanted.sequences]
    for name in COUNTED:
        assert getattr(found.stats, name) == getattr(wanted.stats, name)


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
        open_on_fake(bundle, role, most_recorded=most_recorded, is_poisoned=True)
        for role in ("target", "draft")
    ]
    with machines[0].model as target, machines[1].model as draft:
        for seed in range(3):
            assert_same_request((target, draft), on_host, seed, **options)
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


WITH_FEATURES = [
    {"strategy": "dsbd", "num_beams": 3},
    {"strategy": "speculative", "draft_length": 4},
    {"strategy": "speculative-beam-search", "num_beams": 2},
    {"strategy": "mjsd", "draft_beams": 2},
    {"strategy": "beam-sample", "num_beams": 2},
]


def on_fake(feature_bundle, **options):
    device = FakeDevice()  # one memory, as that of one GPU
    return tuple(
        open_on_fake(feature_bundle, role, device=device, **options) for role in ("target", "draft")
    )


@pytest.mark.parametrize("options", WITH_FEATURES, ids=lambda o: o["strategy"])
@pytest.mark.parametrize("most_recorded", [0, 64])
def test_features_on_a_device_give_the_tokens_of_the_cpu(
    feature_bundle, features_on_host, options, most_recorded
):
    target, draft = on_fake(feature_bundle, most_recorded=most_recorded, is_poisoned=True)
    fakes = target.model, draft.model
    with fakes[0], fakes[1]:
        for seed, prompt in enumerate([PROMPT, PROMPT[:1], PROMPT * 120]):
            assert_same_request(fakes, features_on_host, seed, prompt, **options)
    assert not target.device.live and not target.device.pinned


def test_features_never_cross_to_the_host_and_their_memory_is_used_again(feature_bundle):
    target, draft = on_fake(feature_bundle)
    options = {"strategy": "dsbd", "num_beams": 3, "draft_length": 3}
    with target.model, draft.model:
        generate(target.model, draft.model, 0, **options)
        gc.collect()
        target.device.traffic.clear()
        stats = generate(target.model, draft.model, 0, **options).stats
        traffic = target.device.traffic
        assert traffic.counts["allocate"] == traffic.counts["allocate_pinned"] == 0
        # What crosses to the host are the logits of a call, padded to a power of two of rows.
        num_rows = 2 * (stats.target_rows + stats.draft_rows)
        assert traffic.num_bytes["download"] <= 4 * TARGET.vocab_size * num_rows
        assert traffic.num_bytes["copy_rows"] >= 4 * stats.target_rows * 2 * TARGET.width


def test_held_features_survive_later_calls_and_other_sizes(feature_bundle, features_on_host):
    host, _ = features_on_host
    host.keep(NONE)
    target, draft = on_fake(feature_bundle)
    with target.model, draft.model:
        _, held = logits_and_features(target.model, *chain(5), NONE, feature_rows=np.array([1, 3]))
        _, wanted = logits_and_features(host, *chain(5), NONE, feature_rows=np.array([1, 3]))
        one = held.copied(1)
        for first in (5, 8):
            logits_and_features(target.model, *chain(3, first), NONE, feature_rows=np.arange(3))
        memory = [
            target.device.memory_of(features.array).view(np.float32).reshape(-1, 2 * TARGET.width)
            for features in (held, one)
        ]
        np.testing.assert_allclose(memory[0][:2], wanted.array, atol=1e-5)
        np.testing.assert_allclose(memory[1], wanted.array[1:], atol=1e-5)
        assert (len(held), len(one), one.role) == (2, 1, "target")


def test_features_of_another_provider_are_refused(feature_bundle, features_on_host):
    _, draft = on_fake(feature_bundle)
    features_on_host[0].keep(NONE)
    _, features = logits_and_features(
        features_on_host[0], *chain(1), NONE, feature_rows=np.array([0])
    )
    parents = ParentFeatures((features,), np.array([0]), np.array([0]))
    with draft.model, pytest.raises(InputError, match="HostFeatures, this engine reads DeviceF"):
        logits_and_features(draft.model, *chain(1), NONE, parent_features=parents)
    with pytest.raises(InputError, match=r"draft_provider is 'cuda'.*leave draft_provider out"):
        load_pair(feature_bundle, provider="cpu", draft_provider="cuda")
    with pytest.raises(ProviderError, match="has features, which provider 'tensorrt' does not"):
        load_causal_lm(feature_bundle, "target", provider="tensorrt")


def test_without_memory_for_features_rows_stay_as_they_were(feature_bundle):
    target, _ = on_fake(feature_bundle)
    with target.model:
        logits_and_features(target.model, *chain(2), NONE, feature_rows=np.arange(2))
        target.device.room = 0
        with pytest.raises(CapacityError, match="no memory for the features of 8 rows"):
            logits_and_features(target.model, *chain(7, 2), NONE, feature_rows=np.arange(7))
        target.device.room = 2**30
        assert target.model.num_rows == 2
        logits_and_features(target.model, *chain(7, 2), NONE, feature_rows=np.arange(7))
