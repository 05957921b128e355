"""Integers and scales against the numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_export.quantize_blockwise import Blocks, block_integers, blocks_of, pack_nibbles
from dsbd_export.quantize_dynamic import channel_integers, channel_scales


def test_channels_by_hand():
    weight = np.array([[1, -254], [127, 2], [0, 0]], np.float32)
    assert channel_scales(weight, 1).tolist() == [[2], [1], [1]]
    assert channel_integers(weight, 1).tolist() == [[0, -127], [127, 2], [0, 0]]
    assert channel_integers(weight.T, 0).tolist() == channel_integers(weight, 1).T.tolist()


def test_experts_have_scales_of_their_own():
    weight = np.random.default_rng(0).standard_normal((3, 8, 5)).astype(np.float32)
    scales, integers = channel_scales(weight, -2), channel_integers(weight, -2)
    assert scales.shape == (3, 1, 5)
    assert (np.abs(integers * scales - weight) <= scales / 2 * 1.0001).all()


def test_nibbles_by_hand():
    assert pack_nibbles(np.array([[3, 5, 15]], np.uint8)).tolist() == [[0x53, 0x0F]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_inputs", [32, 48, 70])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_within_half_a_step(bits, num_inputs, dtype):
    weight = np.random.default_rng(0).standard_normal((6, num_inputs)).astype(dtype)
    weight[0] = 0
    blocks = blocks_of(weight, bits)
    integers = block_integers(weight, blocks, bits)
    assert integers.shape == (6, -(-num_inputs // 32), 4 * bits)
    values = dequantized(integers, blocks, bits)[:, :num_inputs]
    steps = np.repeat(blocks.scales, 32, axis=1)[:, :num_inputs]
    # The zero point of 4 bits is rounded, too: the ends of the range may be a step off.
    assert (np.abs(values - weight) <= steps * (1.01 if bits == 4 else 0.501)).all()
    assert (values[0] == 0).all()


def dequantized(integers, blocks: Blocks, bits: int):
    if bits == 4:
        integers = np.stack([integers & 15, integers >> 4], axis=-1).reshape(
            *blocks.scales.shape, 32
        )
    values = (integers - blocks.zero_points[..., None].astype(np.float32)) * blocks.scales[
        ..., None
    ]
    return values.reshape(len(values), -1)
