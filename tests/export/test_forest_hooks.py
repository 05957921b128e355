"""What the cache hook refuses: each would give a graph that is silently wrong."""

from __future__ import annotations

import pytest
import torch

from dsbd_export.errors import ExportError
from dsbd_export.forest_graph import ForestCache

NEW = torch.zeros(1, 2, 3, 8)  # two heads of eight, three rows


def new_cache(num_layers=1):
    past = [(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)) for _ in range(num_layers)]
    return ForestCache(past, torch.tensor([0]))


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
