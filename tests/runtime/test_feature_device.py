"""Features on a device: they stay there, and every request gets the tokens of the CPU."""

import gc

import numpy as np
import pytest

from dsbd_forward.features import ParentFeatures
from dsbd_ort.decoding import DecodingConfig, decode
from dsbd_runtime.errors import CapacityError, InputError, ProviderError
from dsbd_runtime.loading import load_causal_lm, load_pair
from tests.runtime.fake_device import FakeDevice, open_on_fake
from tests.runtime.feature_pair import TARGET
from tests.runtime.model_calls import ONE_THREAD, chain, logits_and_features

NONE = np.arange(0)
PROMPT = [72, 101, 108, 108, 111]
VARIANTS = [
    {"strategy": "dsbd", "num_beams": 3},
    {"strategy": "speculative", "draft_length": 4},
    {"strategy": "speculative-beam-search", "num_beams": 2},
    {"strategy": "mjsd", "draft_beams": 2},
    {"strategy": "beam-sample", "num_beams": 2},
]


@pytest.fixture(scope="module")
def on_host(feature_bundle):
    target, draft = load_pair(feature_bundle, settings=ONE_THREAD)
    with target, draft:
        yield target, draft


def on_fake(feature_bundle, **options):
    device = FakeDevice()  # one memory, as that of one GPU
    return tuple(
        open_on_fake(feature_bundle, role, device=device, **options) for role in ("target", "draft")
    )


def generate(target, draft, seed, prompt, **options):
    config = DecodingConfig(max_new_tokens=20, **options)
    for model in (target, draft):
        model.keep(NONE)
    return decode(target, draft, prompt, config, np.random.default_rng(seed))


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: o["strategy"])
@pytest.mark.parametrize("most_recorded", [0, 64])
def test_requests_get_the_tokens_of_the_cpu(feature_bundle, on_host, options, most_recorded):
    target, draft = on_fake(feature_bundle, most_recorded=most_recorded, is_poisoned=True)
    with target.model, draft.model:
        for seed, prompt in enumerate([PROMPT, PROMPT[:1], PROMPT * 120]):
            found = generate(target.model, draft.model, seed, prompt, **options)
            wanted = generate(*on_host, seed, prompt, **options)
            assert [s.token_ids for s in found.sequences] == [s.token_ids for s in wanted.sequences]
            assert found.stats.draft_rows == wanted.stats.draft_rows
            assert found.stats.num_accepted_tokens == wanted.stats.num_accepted_tokens
    assert not target.device.live and not target.device.pinned


def test_features_never_cross_to_the_host_and_their_memory_is_used_again(feature_bundle):
    target, draft = on_fake(feature_bundle)
    options = {"strategy": "dsbd", "num_beams": 3, "draft_length": 3}
    with target.model, draft.model:
        generate(target.model, draft.model, 0, PROMPT, **options)
        gc.collect()
        target.device.traffic.clear()
        stats = generate(target.model, draft.model, 0, PROMPT, **options).stats
        traffic = target.device.traffic
        assert traffic.counts["allocate"] == traffic.counts["allocate_pinned"] == 0
        # What crosses to the host are the logits of a call, padded to a power of two of rows.
        num_rows = 2 * (stats.target_rows + stats.draft_rows)
        assert traffic.num_bytes["download"] <= 4 * TARGET.vocab_size * num_rows
        assert traffic.num_bytes["copy_rows"] >= 4 * stats.target_rows * 2 * TARGET.width


def test_held_features_survive_later_calls_and_other_sizes(feature_bundle):
    target, draft = on_fake(feature_bundle)
    with (
        target.model,
        draft.model,
        load_causal_lm(feature_bundle, "target", settings=ONE_THREAD) as host,
    ):
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


def test_features_of_another_provider_are_refused(feature_bundle, on_host):
    _, draft = on_fake(feature_bundle)
    on_host[0].keep(NONE)
    _, features = logits_and_features(on_host[0], *chain(1), NONE, feature_rows=np.array([0]))
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
