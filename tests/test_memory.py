"""Real memory: what is given back leaves the resident size, what is kept keeps its bytes, and what a
step needs of glibc's heap is there before. An allocator is set up once, in a process of its own."""

import mmap
import sys

import numpy as np
import torch

from rose import heap
from rose.memory import PAGE, release_pages
from tests.processes import ran

MiB = 2**20


def test_memory_of_others_is_given_back_by_whole_pages():
    tensor = torch.full((4 * MiB,), 5, dtype=torch.uint8)
    inner = tensor[100:-100]
    dropped = release_pages([(inner.data_ptr(), inner.numel())])
    assert 4 * MiB - 2 * PAGE - 200 <= dropped < 4 * MiB
    assert (tensor[:100] == 5).all() and (tensor[-100:] == 5).all()
    assert int(tensor.count_nonzero()) == 4 * MiB - dropped


def test_memory_mapped_from_a_file_is_left_alone(tmp_path):
    (tmp_path / "weights").write_bytes(bytes([9]) * MiB)
    with open(tmp_path / "weights", "r+b") as file:
        private = mmap.mmap(file.fileno(), MiB, flags=mmap.MAP_PRIVATE)
    values = np.frombuffer(private, np.uint8)
    values[:] = 1
    assert release_pages([(values.ctypes.data, MiB)]) == 0 and (values == 1).all()


LIBC = """
import ctypes, resource, sys
from rose import heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
"""
GROW = f"""{LIBC}
libc.malloc(200_000)
heap.keep()
libc.free(libc.malloc(8 << 20))  # the heap grows, and by `AHEAD` more
if sys.argv[1] == "ahead":
    ahead = heap.Ahead()
    calls = 1
    while not ahead.catch_up(0.0):
        calls += 1
    print(calls)
    assert ahead.catch_up(0.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(12):
    libc.memset(libc.malloc(8 << 20), 1, 8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def grow(how):
    done = ran([sys.executable, "-c", GROW, how], check=True, timeout=120)
    return list(map(int, done.stdout.split()))


def test_a_heap_that_grows_meets_no_page_faults_where_it_was_made_resident_ahead():
    assert grow("by fault")[-1] > 20_000
    calls, faults = grow("ahead")
    assert faults < 1000
    assert calls > 100, "each goes on for no longer than it may"


def test_without_such_a_heap_nothing_happens(monkeypatch):
    monkeypatch.setattr(heap, "_heap_start", lambda: None)
    assert heap.Ahead().catch_up(0.0)
    no_memory_of_ours = 0x1000  # the system refuses it
    monkeypatch.setattr(heap, "_heap_start", lambda: no_memory_of_ours)
    ahead = heap.Ahead()
    assert ahead.catch_up(0.0) and ahead.catch_up(0.0)


KEEP_ALL = f"""{LIBC}
heap.keep_all()
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(96 << 20) for _ in range(2)]
    for block in blocks:
        libc.memset(block, 1, 96 << 20)
    for block in blocks:
        libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


def test_a_trainers_large_blocks_are_mapped_once():
    done = ran([sys.executable, "-c", KEEP_ALL], check=True, timeout=120)
    first, second = map(int, done.stdout.split())
    assert first > 1000 * second
