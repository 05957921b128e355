"""Caches of layers are found by running the model; those without one row per token are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsbd_export.capture.caches import probed_caches
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_runtime.parts.cache_entries import AttentionRows


class StubModel(nn.Module):
    """Hands a cache what it is given for each layer, and does nothing else."""

    def __init__(self, rows_by_layer):
        super().__init__()
        self._rows_by_layer = rows_by_layer

    def forward(self, input_ids, cache):
        for layer, (key, value) in self._rows_by_layer.items():
            cache.update(torch.zeros(key), torch.zeros(value), layer)


@pytest.fixture(scope="module")
def checkpoint(llama_folder):
    options = ExportConfig(target="", draft="", output=llama_folder)
    return open_checkpoint("target", llama_folder, options)


def entry(layer, num_heads, key_width, value_width):
    return AttentionRows(
        layer=layer,
        num_heads=num_heads,
        key_width=key_width,
        value_width=value_width,
        dtype="fp16",
    )


def test_layers_have_caches_of_their_own_shapes(checkpoint):
    """Grouped heads, one head of another width, a latent; layer 2 shares the rows of another."""
    model = StubModel(
        {
            0: ((1, 4, 2, 16), (1, 4, 2, 16)),
            1: ((1, 1, 2, 32), (1, 1, 2, 32)),
            3: ((1, 1, 2, 8), (1, 1, 2, 24)),
        }
    )
    assert probed_caches(model, checkpoint, "fp16") == (
        entry(0, 4, 16, 16),
        entry(1, 1, 32, 32),
        entry(3, 1, 8, 24),
    )


REFUSED = [  # (what layer 0 caches, words of the refusal)
    ({}, "hands no keys and values to a cache"),
    ({0: ((1, 2, 16), (1, 2, 16))}, r"layer 0 .*caches \[1, 2, 16\] and \[1, 2, 16\] of 2 tokens"),
    ({0: ((1, 4, 1, 16), (1, 4, 1, 16))}, "expected a key and a value of each token"),
    ({0: ((1, 4, 2, 16), (1, 2, 2, 16))}, "expected a key and a value of each token"),
]


@pytest.mark.parametrize(("rows_by_layer", "words"), REFUSED)
def test_what_is_no_row_of_each_token_is_refused(checkpoint, rows_by_layer, words):
    with pytest.raises(ExportError, match=words):
        probed_caches(StubModel(rows_by_layer), checkpoint, "fp32")


class StatefulModel(nn.Module):
    """Attends in layer 0, and keeps a state in layer 1 by arithmetic of its own."""

    def forward(self, input_ids, cache):
        cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
        cache.get_recurrent_state(1)
        cache.update_recurrent_state(torch.zeros(1, 4, 4), 1)


def test_a_state_of_an_unknown_kind_is_refused(checkpoint):
    with pytest.raises(ExportError, match="layer 1 keeps a recurrent state of another kind"):
        probed_caches(StatefulModel(), checkpoint, "fp32")


class OwnCacheModel(nn.Module):
    """Calls a cache in a way of its own, as ZAYA and MiniMax do."""

    def forward(self, input_ids, cache):
        cache.update_conv_state(torch.zeros(1, 4, 2), 0)


def test_a_cache_that_is_used_in_an_unknown_way_is_refused(checkpoint):
    words = r"family llama\) keeps more than rows .*TypeError: .*conv_kernel_size.*choose another"
    with pytest.raises(ExportError, match=words):
        probed_caches(OwnCacheModel(), checkpoint, "fp16")
