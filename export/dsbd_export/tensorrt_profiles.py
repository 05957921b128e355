"""Optimization profiles: the sizes of calls that an engine is built for."""

from __future__ import annotations

from typing import Any

FORWARD_PROFILES = (1, 8, 32, 256)
"""Rows of a call of the model: one node, a narrow forest, a wide one, a chunk of the prompt."""

_FEW_MOVED_ROWS = 32


def move_profiles(capacity: int) -> tuple[int, ...]:
    """Return the rows of a call of the prune graph: few, or up to all of them."""
    return (_FEW_MOVED_ROWS, capacity)


def add_profiles(builder: Any, config: Any, network: Any, sizes: tuple[int, ...]) -> None:
    """Add a profile for each size: every dynamic dimension from 1 to the size, best at the size."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for size in sizes:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            dims = tuple(tensor.shape)
            if -1 in dims:
                least, most = (tuple(n if dim == -1 else dim for dim in dims) for n in (1, size))
                profile.set_shape(tensor.name, least, most, most)
        config.add_optimization_profile(profile)
