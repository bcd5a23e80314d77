"""Packing in processes: the thread's batches bit for bit, errors that say what happened, and nobody left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinstep.spec.errors import DataError, UnavailableError
from twinstep.spec.job import DataSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.data import packer
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.meter import LoaderMeter
from twinstep.worker.data.order import HostShare
from twinstep.worker.data.packers import ASKED, Packers, packed_ahead, read_shared, write_shared
from twinstep.worker.data.prefetch import Prefetch

DEADLINE = 240.0  # seconds: a machine may be busy
WORKERS = 2


def spec_of(**data: Any) -> DataSpec:
    return DataSpec.model_validate(
        {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 5, "uih_len": 7, "num_candidates": 2} | data
    )


def loader_of(*, start: int = 0, share: HostShare | None = None, **data: Any) -> Loader:
    spec = spec_of(**data)
    loader = Loader(load_dataset(spec), spec, seed=3, share=share)
    loader.seek(loader.position(start))
    return loader


def same(ours: Any, theirs: Any) -> None:
    (batch, stats), (other, others) = ours, theirs
    assert type(batch) is type(other)
    assert stats == others
    for name, value, expected in zip(batch._fields, batch, other, strict=True):
        assert value.dtype == expected.dtype, name
        assert torch.equal(value, expected), name


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def end(process: subprocess.Popen[Any]) -> None:
    """Kill whatever is left of a process's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def packers() -> Iterator[Packers]:
    with Packers(loader_of(start=4, share=HostShare(host=1, hosts=2)), WORKERS) as made:
        yield made


def test_processes_give_the_threads_batches_in_their_order_and_a_worker_that_dies_is_named(packers: Packers) -> None:
    here = loader_of(start=4, share=HostShare(host=1, hosts=2))
    found = packers.batches(3)
    for number in range(3, 50):  # over the end of an epoch
        same(next(found), here.train_batch(number))
    victim = packers.pids[50 % WORKERS]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(UnavailableError, match=rf"process {50 % WORKERS + 1} of 2 \(pid {victim}\) was killed") as told:
        list(itertools.islice(found, (ASKED + 1) * WORKERS))  # after what it had sent
    assert "data.loader_workers" in told.value.remedy
    pids = packers.pids
    packers.close()
    packers.close()
    assert all(map(gone, pids))


def test_a_thread_and_processes_are_one_choice_of_the_spec_and_both_are_bounded() -> None:
    loader = loader_of(dataset="synthetic-clicks")
    with packed_ahead(loader, spec_of(prefetch=3), 2) as batches:
        same(next(batches), loader.train_batch(2))
    with packed_ahead(loader, spec_of(prefetch=3, loader_workers=1), 2) as batches:
        same(next(batches), loader.train_batch(2))
        until(lambda: batches.ready == 3)
        time.sleep(0.1)
        assert batches.ready == 3


def test_leaving_ends_a_process_that_is_stuck() -> None:
    with Packers(loader_of(), 1) as made, Prefetch(made.batches(0)) as batches:
        try:
            next(batches)
            os.kill(made.pids[0], signal.SIGSTOP)
        finally:
            made.end()
    assert gone(made.pids[0])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_socket_is_left_open() -> None:
    loader, before = loader_of(), open_files()
    with packed_ahead(loader, spec_of(loader_workers=2), 0) as batches:
        next(batches)
        assert open_files() >= before + 2
    assert open_files() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(75), OSError("no more processes")])
def test_what_interrupts_the_start_leaves_no_process_and_no_socket(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    loader, before, whole = loader_of(), open_files(), subprocess.Popen

    def second_fails(*given: Any, **more: Any) -> Any:
        if started:
            raise error
        started.append(whole(*given, **more))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(UnavailableError if isinstance(error, OSError) else type(error)):
        Packers(loader, 2)
    assert gone(started[0].pid)
    assert open_files() == before


CHILD = """
import sys, time
from twinstep.spec.job import DataSpec
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.packers import Packers
spec = DataSpec.model_validate({"dataset": "synthetic", "synthetic_events": 400})
packers = Packers(Loader(load_dataset(spec), spec, seed=0), 2)
next(packers.batches(0))
print(*packers.pids, flush=True)
time.sleep(600)
"""


def test_processes_end_with_a_run_that_is_killed() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            pids = [int(word) for word in child.stdout.readline().split()]
            child.kill()
        finally:
            end(child)
    assert len(pids) == 2
    until(lambda: all(map(gone, pids)))


RUN = """
import json, sys
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import run_spec
run_spec(validate_spec(json.loads(sys.argv[1])), quiet=True)
"""
SPEC: dict[str, Any] = {
    "name": "t",
    "model": {
        "embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
        "dropout": 0.1,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2},
    "compile": {"backend": "eager", "cache": False},
    "train": {"steps": 100_000, "eval_batches": 1},
    "runtime": {"threads": 1},
}  # fmt: skip


def run(place: Path, *, steps: int, workers: int, stop_at: int | None = None) -> int:
    """Train to `steps`, or until the group is told to stop after the checkpoint of `stop_at`; return the exit code."""
    spec = {
        **SPEC,
        "data": {**SPEC["data"], "loader_workers": workers},
        "train": {**SPEC["train"], "steps": steps},
        "checkpoint": {"path": str(place), "every_steps": 10, "keep_last": 2},
    }
    validate_spec(spec)
    with subprocess.Popen([sys.executable, "-c", RUN, json.dumps(spec)], start_new_session=True) as process:
        try:
            if stop_at is not None:
                until(lambda: any(int(each.rsplit("-", 1)[1]) >= stop_at for each in open_place(place).names()))
                os.killpg(process.pid, signal.SIGTERM)
            return process.wait(DEADLINE)
        finally:
            end(process)


def tensors(place: Path) -> tuple[int, dict[str, torch.Tensor]]:
    name = max(open_place(place).names())
    reader = Reader(open_place(place), name)
    return reader.manifest.step, reader.tensors()


def test_a_signal_to_the_runs_group_stops_it_between_steps_and_it_goes_on_exactly(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert run(broken, steps=100_000, workers=1, stop_at=20) == 75
    step, _ = tensors(broken)
    assert step >= 20
    end = step + 7
    assert run(broken, steps=end, workers=1) == 0
    assert run(whole, steps=end, workers=0) == 0
    (done, ours), (expected, theirs) = tensors(broken), tensors(whole)
    assert done == expected == end
    for path, value in theirs.items():  # a run that went on keeps state of parameters without a gradient too: zeros
        assert torch.equal(ours[path], value), path


class Broken:
    """A loader that cannot pack."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def train_batch(self, number: int) -> Any:
        raise self._error


def test_an_error_of_packing_is_told_as_it_is() -> None:
    told = packer._answer(Broken(DataError("row 7 is bad", remedy="mend it")), 0)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(told))  # noqa: S301  it has just been written
    assert again == {"code": "invalid_data", "problem": "row 7 is bad", "remedy": "mend it"}
    from twinstep.worker.data.packers import _error_of

    error = _error_of(again)
    assert type(error) is DataError
    assert (error.problem, error.remedy) == ("row 7 is bad", "mend it")
    assert "ZeroDivisionError" in packer._answer(Broken(ZeroDivisionError()), 0)["traceback"]  # type: ignore[arg-type]


def test_arrays_are_mapped_from_one_file_and_those_mapped_already_from_their_own(tmp_path: Path) -> None:
    kept = np.memmap(tmp_path / "kept", dtype=np.int32, mode="w+", shape=(6, 2))
    kept[:] = np.arange(12).reshape(6, 2)
    kept.flush()
    mapped = np.memmap(tmp_path / "kept", dtype=np.int32, mode="r", shape=(6, 2))
    value = {"a": np.arange(1000.0), "none": np.zeros((0, 3)), "mapped": mapped, "part": mapped[2:4], "x": [1, "b"]}
    with tempfile.TemporaryFile() as file:
        write_shared(value, file)
        assert file.tell() < 8000 + 2000
        found = read_shared(file.fileno())
    assert found["x"] == value["x"]
    for name in ("a", "none", "mapped", "part"):
        np.testing.assert_array_equal(found[name], value[name])
        assert found[name].dtype == value[name].dtype
    assert isinstance(found["mapped"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found["a"][0] = 1


def test_what_the_loop_sees_of_its_loader_adds_up_between_reports() -> None:
    loader = loader_of()
    meter = LoaderMeter(packers=2)
    assert meter.report() == {}
    stats = [loader.train_batch(number)[1] for number in range(4)]
    for each, ready in zip(stats, (0, 1, 2, 2), strict=True):
        meter.add(each, waited=0.25, ready=ready)
    found = meter.report()
    assert found["data_wait_ms"] == pytest.approx(250)
    assert found["batches_ready"] == pytest.approx(1.25)
    packed = sum(each.pack_s for each in stats)
    assert found["loader_examples_per_s"] == pytest.approx(2 * sum(each.examples for each in stats) / packed)
    assert meter.report() == {}
