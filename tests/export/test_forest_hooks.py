"""What the hooks refuse: each would give a graph that is silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsbd_export.errors import ExportError
from dsbd_export.forest_hooks import ForestCache, forest_attention, refuse_own_mask

NEW = torch.zeros(1, 2, 3, 8)  # two heads of eight, three rows
MASK = torch.ones(1, 1, 3, 16, dtype=torch.bool)


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


def test_attention_without_a_mask():
    with pytest.raises(ExportError, match="Identity attends without a mask"):
        forest_attention(nn.Identity(), NEW, NEW, NEW, None)


def test_attention_sinks():
    with pytest.raises(ExportError, match="attention sinks"):
        forest_attention(nn.Identity(), NEW, NEW, NEW, MASK, s_aux=torch.zeros(2))


def test_a_mask_of_the_model_itself():
    with pytest.raises(ExportError, match="builds a mask of its own"):
        refuse_own_mask(batch_size=1)
