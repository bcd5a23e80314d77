"""Memory of buffers is taken again only when nothing holds a part of it, and holds nothing of the batch before; tasks
are dealt out evenly, each once, to threads that run beside one another."""

import gc
import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.worker.embedding.sparsecore.inputs import Dense
from twinstep.worker.embedding.sparsecore.kernels.run import claim
from twinstep.worker.embedding.sparsecore.limits import limits_from_batches
from twinstep.worker.embedding.sparsecore.preprocess import Preprocessor
from twinstep.worker.embedding.sparsecore.result import Slabs
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks
from twinstep.worker.embedding.sparsecore.workers import FEW, TURNS, Workers

SAMPLES, WIDTH = 64, 6


def batch(rng, rows):
    """Ids of two features, of which a random part is left out."""
    made = {}
    for name in "ab":
        ids = rng.integers(0, rows, (SAMPLES, WIDTH)).astype(np.int32)
        ids[rng.random(ids.shape) < rng.random()] = -1
        made[name] = Dense(ids, padding=-1)
    return made


def words(found):
    """All words of all buffers, those outside partitions too."""
    return {
        name: [part.view(np.int32).copy() for part in (b.row_pointers, b.embedding_ids, b.sample_ids, b.gains)]
        for name, b in found.buffers.items()
    }


def same(one, other):
    return all(np.array_equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cores=st.sampled_from([Cores(devices=1, per_device=4), Cores(devices=16, per_device=4)]),
    held=st.lists(st.booleans(), min_size=4, max_size=8),
)
def test_each_batch_finds_memory_as_if_it_were_new(seed, cores, held):
    rng = np.random.default_rng(seed)
    tables = [Table(name=name, rows=rows, dim=8, combiner="sum") for name, rows in (("a", 500), ("b", 90))]
    features = [Feature(name=name, table=name, samples=SAMPLES * cores.devices) for name in "ab"]
    full = {name: Dense(np.tile(np.arange(WIDTH, dtype=np.int32), (SAMPLES, 1)), padding=-1) for name in "ab"}
    batches = [batch(rng, 90) for _ in held]
    plan = limits_from_batches(plan_stacks(tables, features, cores), [full, *batches], headroom=2.0, local_devices=1)
    again = Preprocessor(plan, local_devices=1, threads=1)
    kept = []
    for each, hold in zip(batches, held, strict=True):
        found = again(each)
        alone = Preprocessor(plan, local_devices=1, threads=1)
        assert same(words(found), words(alone(each)))
        if hold:
            kept.append((found.buffers, words(found)))
    for buffers, before in kept:
        for name, mine in buffers.items():
            parts = (mine.row_pointers, mine.embedding_ids, mine.sample_ids, mine.gains)
            assert all(np.array_equal(a.view(np.int32), b) for a, b in zip(parts, before[name], strict=True))


def test_one_view_is_enough_to_keep_a_slab_and_its_end_gives_it_back():
    slabs, shapes = Slabs(), {"s": ((1, 8), (1, 64))}
    slab, stale = slabs.take(shapes, 1)
    slab.written = np.full(1, 5)
    first = slab.memory.ctypes.data
    part = slab.buffers()["s"].gains[0, 3:4]
    del slab
    other, _ = slabs.take(shapes, 1)
    assert other.memory.ctypes.data != first
    assert stale.tolist() == [0]
    del part
    gc.collect()
    again, stale = slabs.take(shapes, 1)
    assert again.memory.ctypes.data == first
    assert stale.tolist() == [5]


def test_a_slab_of_which_nobody_said_what_was_written_is_not_used_again():
    slabs, shapes = Slabs(), {"s": ((1, 8), (1, 64))}
    slab, _ = slabs.take(shapes, 1)
    slab.memory[:] = 7
    del slab
    again, stale = slabs.take(shapes, 1)
    assert not again.memory.any()
    assert stale.tolist() == [0]


def test_few_slabs_are_kept_however_many_are_held_at_once():
    slabs, shapes = Slabs(), {"s": ((1, 8), (1, 64))}
    held = []
    for _ in range(12):
        slab, _ = slabs.take(shapes, 1)
        slab.written = np.zeros(1, np.int64)
        held.append(slab.buffers())
    assert len(slabs._slabs) <= Slabs.KEPT


@given(
    entries=st.lists(st.integers(0, 200_000), min_size=1, max_size=60),
    threads=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_every_task_is_in_one_run_and_no_run_is_much_more_than_its_part(entries, threads):
    workers = Workers(threads)
    try:
        edges = workers.share(np.array(entries, np.int64))
    finally:
        workers.close()
    assert edges[0] == 0
    assert edges[-1] == len(entries)
    assert (np.diff(edges) > 0).all()
    total = sum(entries)
    if total >= FEW and threads > 1:
        most = max(sum(entries[low:high]) for low, high in itertools.pairwise(edges))
        assert most <= total / (threads * TURNS) + max(entries)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_run_of_tasks_is_taken_once_however_many_threads_ask(threads):
    workers, taken = Workers(threads), []

    def work(turns, _scratch):
        while (run := tuple(claim(turns))) != (0, 0):
            taken.append(run)

    try:
        for _ in range(20):
            taken.clear()
            workers.run(np.arange(0, 303, 3), work)
            assert sorted(taken) == [(at, at + 3) for at in range(0, 300, 3)]
    finally:
        workers.close()


def test_a_fault_in_one_thread_is_told_once_all_have_stopped():
    workers, running = Workers(3), []

    def work(turns, scratch):
        running.append(scratch)
        try:
            while tuple(claim(turns)) != (0, 0):
                raise ValueError("a fault")
        finally:
            running.remove(scratch)

    try:
        with pytest.raises(ValueError, match="a fault"):
            workers.run(np.arange(20), work)
        assert not running
    finally:
        workers.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_threads_are_placed_off_the_processor_that_gives_them_work():
    workers, places = Workers(2), []
    meet = threading.Barrier(2)

    def work(_turns, _scratch):
        meet.wait(30)  # so that both threads take part
        places.append((threading.current_thread().name.startswith("sparsecore"), os.sched_getaffinity(0)))

    before = os.sched_getaffinity(0)
    try:
        for _ in range(3):
            workers.run(np.arange(3), work)
    finally:
        workers.close()
    assert os.sched_getaffinity(0) == before
    assert all(len(place) < len(before) for pooled, place in places[-2:] if pooled)
    assert all(place == before for pooled, place in places if not pooled)
