"""What a step frees is there for the next one, with no page faults; an allocator that the user set up is left alone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")

CHILD = """
import resource
from twinstep.worker.compile.lower.memory import give_back, keep_freed_memory
import torch

kept = keep_freed_memory(large=True)
def steps():
    for _ in range(5):
        each = [torch.empty(size << 18).fill_(1) for size in (3, 5, 40)]  # MiB
        del each
steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
give_back()
held = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Vm")}
print(kept, faults, held["VmHWM"] - held["VmRSS"])
"""
PAGES = 5 * (3 + 5 + 40) * 256


def child(**environment: str) -> tuple[bool, int, int]:
    """Return whether freed memory is kept, page faults of five steps, and the KiB that were given back after them."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", CHILD], env=plain | environment, capture_output=True, text=True, check=True
    )
    kept, faults, back = told.stdout.split()
    return kept == "True", int(faults), int(back)


def test_freed_buffers_are_not_faulted_in_again_and_can_be_given_back() -> None:
    kept, faults, back = child()
    assert kept
    assert faults < PAGES / 100
    assert back > 40_000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_an_allocator_that_the_user_set_up_is_left_as_it_is(name: str) -> None:
    kept, faults, _ = child(**{name: "131072"})
    assert not kept
    assert faults > PAGES / 10


THREADS = """
import ctypes, resource, sys, threading
from twinstep.worker.train.environment import settle_memory

settled = settle_memory() if sys.argv[1] == "settled" else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
met = threading.Barrier(5)

def others():
    libc.malloc(100)
    met.wait()
    met.wait()  # those that end would leave their arenas to the next

for _ in range(4):
    threading.Thread(target=others).start()
met.wait()
for name, value in ((-1, 2**31 - 1), (-3, 32 << 20), (-4, 0), (-8, 1)):  # as keep_freed_memory(large=True)
    libc.mallopt(name, value)

def step():
    size = 100 << 20
    memory = libc.malloc(size)
    libc.memset(memory, 1, size)
    libc.free(memory)

def count(found):
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
for _ in range(4):  # arenas are given out in turn
    thread = threading.Thread(target=count, args=(found,))
    thread.start()
    thread.join()
met.wait()
print(settled, max(found))
"""


@pytest.mark.parametrize("how", ["settled", "left"])
def test_a_large_buffer_of_another_thread_is_kept_where_all_share_one_arena(how: str) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", THREADS, how], env=plain, capture_output=True, text=True, check=True, timeout=60
    )
    settled, faults = told.stdout.split()
    assert settled == str(how == "settled")
    pages = 100 * 256
    assert int(faults) < pages / 100 if how == "settled" else int(faults) > pages / 2


RUN = """
import sys
from twinstep.spec.parse import validate_spec
from twinstep.worker import train

def here(spec):  # the first that a run does beside them: by now the thread that hears an early SIGTERM is there
    import ctypes, threading
    libc, path = ctypes.CDLL(None), sys.argv[1].encode()
    met = threading.Barrier(5)
    for _ in range(4):
        threading.Thread(target=lambda: (libc.malloc(100), met.wait())).start()
    met.wait()
    libc.fopen.restype = ctypes.c_void_p
    libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
    file = libc.fopen(path, b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(open(path).read().count("<heap nr="))
    sys.exit(0)

train.prepare_environment = here
train.run_spec(validate_spec({"name": "a", "compile": {"backend": "xla"}}), ends_process=True)
"""


def test_a_run_on_xla_has_one_arena_whatever_thread_it_starts_first(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "heaps")],
        env=plain, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert told.stdout.split() == ["1"]
