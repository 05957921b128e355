"""Refusals of the cache hook: each case would give a graph that is silently wrong."""

from __future__ import annotations

import pytest
import torch

from dsbd_export.capture.caches import ForestCache
from dsbd_export.capture.replacements import forest_attention
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.cache_entries import ATTENTION_ROWS

NEW = torch.zeros(1, 2, 3, 8)  # two heads of eight, three rows


def new_cache(num_layers=1):
    past = [(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)) for _ in range(num_layers)]
    by_layer = {(layer, ATTENTION_ROWS): each for layer, each in enumerate(past)}
    return ForestCache(by_layer, {ATTENTION_ROWS: torch.tensor([0])})


def test_the_cache_gives_back_all_rows():
    cache = new_cache()
    key, value = cache.update(NEW, NEW, 0)
    assert key.shape == value.shape == (1, 2, 16, 8)
    assert cache.present() == [(key, value)]


def test_a_layer_that_writes_twice():
    cache = new_cache()
    cache.update(NEW, NEW, 0)
    with pytest.raises(ExportError, match="layer 0 writes its cache twice"):
        cache.update(NEW, NEW, 0)


def test_a_layer_that_shares_the_cache_of_another():
    cache = new_cache(num_layers=2)
    cache.update(NEW, NEW, 0)
    with pytest.raises(ExportError, match=r"layers \[1\] write no cache"):
        cache.present()


def test_values_of_another_shape_than_keys():
    with pytest.raises(ExportError, match="layer 0 caches 2 heads of 4, expected 2 of 8"):
        new_cache().update(NEW, NEW[..., :4], 0)


def attend(**arguments: object):
    query, mask = torch.zeros(1, 2, 3, 8), torch.ones(1, 1, 3, 16, dtype=torch.bool)
    rows = torch.zeros(1, 2, 16, 8)
    return forest_attention(torch.nn.Identity(), query, rows, rows, mask, **arguments)


OTHER_ARGUMENTS = [
    ("indices", torch.zeros(1, 3, 4, dtype=torch.int64), r"indices \(a tensor \[1, 3, 4\]\)"),
    ("position_bias", torch.zeros(1, 2, 3, 16), r"position_bias \(a tensor"),
    ("dropout", 0.1, r"dropout \(0.1\)"),
    ("is_causal", False, r"is_causal \(False\)"),
    ("temperature", 2.0, r"temperature \(2.0\)"),
]


@pytest.mark.parametrize(("name", "value", "said"), OTHER_ARGUMENTS)
def test_an_argument_that_may_change_attention(name, value, said):
    with pytest.raises(ExportError, match=f"Identity gives attention the argument {said}"):
        attend(**{name: value})


def test_arguments_without_effect():
    neutral = {"dropout": 0.0, "position_bias": None, "sliding_window": 4, "use_cache": True}
    attended, _ = attend(position_ids=torch.arange(3)[None], **neutral)
    assert attended.shape == (1, 3, 2, 8)
