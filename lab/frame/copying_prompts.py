"""Prompts that begin to repeat what they hold, made from Python's standard library.

A function, and it once more with a variable renamed as far as its first lines, to be gone on with;
and a passage followed by its own beginning.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import json
import keyword
import shlex
import statistics
import textwrap

FUNCTIONS = (shlex.join, shlex.quote, textwrap.dedent, statistics.median, json.dumps, json.loads)
MOST_CHARACTERS = 600  # of a source: the context is short
COPIED_SHARE = 0.3  # of a text, before it is to be gone on with


def renamed(source: str) -> str:
    """Return a function with its first own variable renamed throughout."""
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name | ast.arg)
    ]
    known = {*dir(builtins), *keyword.kwlist, "self"}
    name = next(name for name in names if name not in known)
    words = source.split(name)
    is_whole = [
        not (before[-1:].isidentifier() or before[-1:].isdigit() or after[:1].isidentifier())
        for before, after in itertools.pairwise(words)
    ]
    parts = [words[0]]
    for whole, word in zip(is_whole, words[1:], strict=True):
        parts += ["value_" + name if whole else name, word]
    return "".join(parts)


def copying_prompts() -> list[str]:
    """Return prompts that begin to repeat what they hold."""
    prompts = []
    for function in FUNCTIONS:
        source = textwrap.dedent(inspect.getsource(function))
        again = renamed(source)
        source = source[:MOST_CHARACTERS]
        prompts.append(f"{source}\n\n{again[: int(COPIED_SHARE * len(source))]}")
        prompts.append(f"{source}\n\n{source[: int(COPIED_SHARE * len(source))]}")
    return prompts
