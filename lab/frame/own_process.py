"""A function called in a process of its own, so that its memory and caches are its own."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def in_own_process(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Return what a function of a module returns in a new process, which ends with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()
