"""Memory that an engine takes is gathered into huge pages, where the system has them."""

import mmap
import re
import threading
from pathlib import Path

import pytest

from dsbd_runtime.ort.huge_pages import (
    HUGE_PAGE,
    MAPS,
    are_offered,
    huge_pages,
    inner_pages,
    private_ranges,
)

MAPPINGS = """\
00400000-00c00000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0001000000-7f0002000000 rw-p 00000000 fe:00 5423213            /lib/a library.so
7f0003000000-7f0004000000 r--p 00000000 00:00 0
7f0005000000-7f0006000000 rw-s 00000000 00:01 77                 /dev/zero (deleted)
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                  [stack]
"""


def test_only_private_memory_of_no_file_counts():
    found = list(private_ranges(MAPPINGS))
    assert found == [(0x400000, 0xC00000), (0x7F0000100000, 0x7F0000900000)]


def test_whole_pages_of_large_ranges_are_gathered():
    large, small = (HUGE_PAGE + 4096, 4 * HUGE_PAGE), (0, HUGE_PAGE)
    assert list(inner_pages([large, small])) == [(2 * HUGE_PAGE, 4 * HUGE_PAGE)]


@pytest.mark.parametrize(
    ("platform", "policy", "offered"),
    [
        ("linux", "always [madvise] never\n", True),
        ("linux", "[always] madvise never\n", True),
        ("linux", "always madvise [never]\n", False),
        ("linux", None, False),
        ("darwin", "[always] madvise never\n", False),
    ],
)
def test_the_administrator_decides(platform, policy, offered, tmp_path):
    file = tmp_path / "enabled"
    if policy is not None:
        file.write_text(policy)
    assert are_offered(platform, file) is offered


@pytest.mark.skipif(not are_offered(), reason="this system has no huge pages to ask for")
def test_memory_taken_meanwhile_becomes_huge_pages():
    with huge_pages():
        memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    for thread in threading.enumerate():
        if thread.name == "dsbd-huge-pages":
            thread.join(60.0)
    flags = re.findall(r"VmFlags:(.*)", MAPS.with_name("smaps").read_text())
    assert any(" hg" in line for line in flags)  # a mapping wants huge pages
    kernel = re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())
    if (int(kernel[0]), int(kernel[1])) >= (6, 1):
        rollup = MAPS.with_name("smaps_rollup").read_text()
        assert int(re.findall(r"AnonHugePages: +(\d+)", rollup)[0]) >= 4 * HUGE_PAGE >> 10
    assert all(memory[page] == 1 for page in range(0, len(memory), mmap.PAGESIZE))


def test_an_error_meanwhile_is_handed_on():
    with pytest.raises(ValueError, match="no engine"), huge_pages():
        raise ValueError("no engine")
