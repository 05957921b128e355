"""Memory of grammars: counted as it is, bounded for all together, and given back."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort.constraints import GrammarTokenizer, Lark, Regex, grammar_memory
from dsbd_ort.constraints.grammar_memory import (
    GrammarMemory,
    MemoryLimit,
    held_bytes,
    resident_bytes,
)
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.forest_of_states import grammar_tokenizer, tokens_of

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
ITEMS = Lark("start: ITEM+\nITEM: /[a-z]{1,5},/")  # any length
needs_glibc = pytest.mark.skipif(not held_bytes(), reason="needs glibc's mallinfo2")


@pytest.fixture
def guarded() -> Iterator[GrammarTokenizer]:
    gc.collect()  # what other tests have left would be freed, and counted, within
    with closing(grammar_tokenizer(is_guarded=True)) as made:
        yield made


def hostile(salt: int, number: int = 380) -> Lark:
    """Terminals that nearly every text may still match, so that most states of the lexer are new.

    With 380 of them a state takes 4 kB.
    """
    letters = [chr(97 + i) for i in range(26)]
    terminals = [
        f"T{i}: /[a-z]*{letters[i % 26]}{letters[(7 * i + salt) % 26]}[a-z]{{{2 + i % 40}}}/"
        for i in range(number)
    ]
    names = " | ".join(f"T{i}" for i in range(number))
    return Lark("\n".join([f"start: ({names})+", *terminals]))


def follow(constraint: Any, states: Any, num_steps: int, seed: int = 0) -> Any:
    """Return the states after so many random tokens, whose masks are computed."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        masks = constraint.allowed(states).bits
        states = constraint.advance(states, np.array([rng.choice(tokens_of(masks[0]))]))
    return states


@needs_glibc
def test_a_request_that_grows_too_large_ends_and_others_go_on(guarded: GrammarTokenizer) -> None:
    guarded._memory_limit._most_bytes = 96 * MIB  # 16 without what is reserved
    other = ITEMS.bind(guarded)
    states = follow(other, other.start([]), 20)
    grammar_memory._glibc().malloc_trim(0)  # growth within free memory would not be seen at first
    before = held_bytes()
    grows = hostile(0).bind(guarded)
    with pytest.raises(ConstraintError, match=r"uses \d+ MiB, and all .* simplify it: fewer") as e:
        follow(grows, grows.start([]), 220)
    assert 14 * MIB < grows.memory.num_bytes < 48 * MIB
    assert grows.memory.num_bytes == pytest.approx(held_bytes() - before, rel=0.5)
    with pytest.raises(ConstraintError, match="simplify it"):  # nor may another request go on
        grows.allowed(grows.start([]))
    follow(other, states, 20)
    again = hostile(0).bind(guarded)
    assert again is not grows
    del grows, e
    assert held_bytes() - before < 8 * MIB


@needs_glibc
def test_without_a_limit_a_large_grammar_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen by the growth of the process: each look at all free memory can take long."""
    made = grammar_tokenizer()
    grows = hostile(1).bind(made)
    monkeypatch.delattr(grammar_memory, "held_bytes")
    follow(grows, grows.start([]), 160)
    monkeypatch.undo()
    assert grows.is_spent and hostile(1).bind(made) is not grows


@needs_glibc
def test_far_from_the_limit_no_step_looks_at_all_free_memory(
    guarded: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = ITEMS.bind(guarded)
    looks = []
    monkeypatch.setattr(grammar_memory, "held_bytes", lambda: looks.append(1) or held_bytes())
    states = follow(constraint, constraint.start([]), 100)
    assert not looks
    constraint.memory.compiled = 100 * MIB
    follow(constraint, states, 1)  # the step at which it is noted
    assert guarded._memory_limit.is_near and not looks
    follow(constraint, constraint.advance(states, np.array([tokens_of(states[0].bits)[0]])), 3)
    assert len(looks) >= 2


@needs_glibc
def test_freed_memory_is_given_back_so_that_new_growth_is_seen() -> None:
    limit, _ = limited(200 * MIB)
    memory = memory_of(limit, "grows", 0)
    grammar_memory._glibc().malloc_trim(0)
    with memory.following():
        pieces = [bytes(1000) for _ in range(60_000)]
    assert memory.num_bytes > 40 * MIB
    last = bytes(1000)  # keeps the memory below it, which the library would give back by itself
    memory.followed = 0
    before = resident_bytes()
    del pieces
    assert before - resident_bytes() < 10 * MIB
    limit.keep()
    assert before - resident_bytes() > 40 * MIB and last


@needs_glibc
def test_what_a_request_takes_is_counted_once_and_given_back(guarded: GrammarTokenizer) -> None:
    """Matchers come and go with every token; the masks that are returned are not the grammar's."""
    constraint = ITEMS.bind(guarded)
    states = follow(constraint, constraint.start([]), 300)
    assert abs(constraint.memory.followed) < MIB  # other threads allocate and free as well
    assert constraint.memory.num_requests == 1
    follow(constraint, states, 300)
    del states
    assert constraint.memory.num_requests == 0
    assert abs(constraint.memory.followed) < MIB


def limited(most: int) -> tuple[MemoryLimit, list[GrammarMemory]]:
    """Return a limit, whose grammars have followers unless they stand in the list."""
    unused: list[GrammarMemory] = []

    def drop_one() -> bool:
        if not unused:
            return False
        unused.pop().compiled = 0
        return True

    return MemoryLimit(grammar_memory._RESERVED_BYTES + most, drop_one), unused


def memory_of(limit: MemoryLimit, name: str, num_bytes: int) -> GrammarMemory:
    memory = GrammarMemory(name, limit)
    memory.compiled, memory.num_requests = num_bytes, 1
    limit.take_in(memory)
    return memory


def test_unused_grammars_go_first_then_the_largest_ends() -> None:
    limit, unused = limited(100)
    small, large, idle = (memory_of(limit, n, b) for n, b in (("s", 30), ("l", 40), ("i", 30)))
    idle.num_requests = 0
    unused.append(idle)
    small.followed = 20
    limit.keep()
    assert not unused and not (small.is_over or large.is_over)
    small.followed = 35
    limit.keep()
    assert small.is_over and not large.is_over
    with pytest.raises(ConstraintError, match="s uses 0 MiB"):
        small.check()
    limit.keep()
    large.check()


def test_a_grammar_that_does_not_fit_is_refused_and_those_that_run_go_on() -> None:
    limit, _ = limited(100)
    runs = memory_of(limit, "runs", 70)
    with pytest.raises(ConstraintError, match="new uses"):
        memory_of(limit, "new", 40)
    runs.check()
    assert not memory_of(limit, "small", 20).is_over


def test_users_own_grammars_have_no_limit() -> None:
    made = grammar_tokenizer()
    assert made._memory_limit._most_bytes is None
    assert Regex("[ab]").bind(made).memory.num_bytes >= 0


TWO_AT_A_TIME = """
from pathlib import Path
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.forest_of_states import grammar_tokenizer
from tests.constraints.test_grammar_memory import follow, hostile

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

tokenizer = grammar_tokenizer(is_guarded=True)
before = most = resident()
live = {salt: hostile(salt).bind(tokenizer) for salt in range(2)}
states = {salt: constraint.start([]) for salt, constraint in live.items()}
for step in range(220):
    for salt, constraint in list(live.items()):
        try:
            states[salt] = follow(constraint, states[salt], 1, step)
        except ConstraintError:
            del states[salt], live[salt], constraint
        most = max(most, resident())
tokenizer.close()
print((most - before) >> 20, len(live))
"""


@pytest.mark.slow
@needs_glibc
def test_two_hostile_grammars_stay_below_the_limit() -> None:
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "export", "runtime"))
    done = subprocess.run(
        [sys.executable, "-c", TWO_AT_A_TIME],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    growth, num_left = map(int, done.stdout.split())
    assert growth < 256 and num_left < 2
