"""Call of a function in a separate process, so that memory and caches are not shared."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def in_own_process(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Return the result of a module's function, called in a new process that ends afterwards."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()
