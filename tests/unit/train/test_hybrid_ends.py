"""What ends a run of several processes, or must not: a batch that cannot be drawn, a lost process, a full disk, a stop.

No process but this one; `test_hybrid_runs.py` has real ones.
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

sys.path.insert(0, str(Path(__file__).parent))
from hybrid_child import Noting
from test_hybrid_parallel import DLRM, TABLES, divided, spec_of

from twinstep.spec.errors import DataError, PeerLostError, UnavailableError
from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint.place import LocalPlace
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.train import run as runs
from twinstep.worker.train import shared_saving
from twinstep.worker.train.group import Group
from twinstep.worker.train.hybrid import HybridStepper
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.stop import StopSignal

CPU = torch.device("cpu")
TWO = Ranks(rank=0, size=2, address="127.0.0.1", port=1)


@pytest.fixture
def alone() -> Iterator[Group]:
    group = Group(Ranks(), device=CPU, seconds=60)
    group.join()
    try:
        yield group
    finally:
        group.leave()


class Bare(HybridStepper):
    """Draws and steps as a HybridStepper does, with nothing behind it."""

    def __init__(self, *, rank: int = 0, steps: int = 3) -> None:
        ranks, embedding = SimpleNamespace(rank=rank, size=2), SimpleNamespace(overlap=True)
        self._group: Any = SimpleNamespace(ranks=ranks, several=True, stop=None)
        self._spec: Any = SimpleNamespace(train=SimpleNamespace(seed=3, steps=steps), embedding=embedding)
        self._state: Any = SimpleNamespace(take_rates=lambda: None, updates=0)
        self._compiler: Any = SimpleNamespace(program=lambda share, sizes: lambda share: share)
        self._tables, self._checks_finite = None, False
        self._next, self._fault, self._source = None, None, iter(())
        self.begun: list[Any] = []

    def _begin(self, item: Any) -> Any:
        self.begun.append(item.batch)
        return item

    def _arrive(self, item: Any) -> Any:
        return item.stats

    def _share(self, item: Any, rows: tuple[Tensor, ...]) -> Any:
        return item.batch


def batches(count: int) -> Iterator[Any]:
    for number in range(count):
        yield SimpleNamespace(batch=number, stats=None, ids=None, sent=None), None
    raise DataError("the next batch is broken", remedy="mend it")


def trained(stepper: Bare, source: Iterator[Any], steps: int, done: list[int]) -> None:
    drawn = stepper.drawn(source)
    for step in range(steps):
        item, _ = next(drawn)
        done.append(stepper.program(item, sizes={}, step=step)())  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_drawn_takes_no_step_before_it_along() -> None:
    stepper, done = Bare(steps=5), list[int]()
    with pytest.raises(DataError, match="next batch is broken"):
        trained(stepper, batches(2), 5, done)
    assert done == [0, 1]
    assert stepper.begun == [0, 1, 1]  # the others wait for a third exchange within the second step
    done.clear()
    trained(stepper, batches(1), 1, done)  # the fault is not kept for batches that are drawn anew
    assert done == [0]


def test_a_run_ends_well_before_a_batch_that_it_never_trains() -> None:
    stepper, done = Bare(steps=3), list[int]()
    trained(stepper, batches(3), 3, done)
    assert done == stepper.begun == [0, 1, 2]


def test_each_process_draws_masks_of_its_own_from_each_step_on() -> None:
    masks = set()
    for rank in range(1, 4):
        for step in (0, 1, 1 << 16):
            Bare(rank=rank)._draw_apart(step)
            masks.add(tuple(torch.nn.functional.dropout(torch.ones(64)).tolist()))
    assert len(masks) == 9


def gloo_pair(work: Callable[[int, Any], None]) -> list[BaseException | None]:
    """Let two threads be the processes of a gloo group; return what ended each."""
    store, ended = distributed.HashStore(), [None, None]  # type: list[Any]

    def be(rank: int) -> None:
        try:
            work(rank, distributed.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=2)))
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return ended


def test_what_gloo_says_of_a_late_process_is_a_lost_one() -> None:
    over = threading.Event()

    def work(rank: int, group: Any) -> None:
        if rank:
            over.wait(60)  # does not take part
            return
        try:
            group.allreduce([torch.ones(1)]).wait()
        finally:
            over.set()

    error = gloo_pair(work)[0]
    assert type(error) is RuntimeError
    with pytest.raises(PeerLostError), Group(TWO, device=CPU, seconds=1).minding():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError("Timeout while reading gs://bucket/part-0"),
        BrokenPipeError(32, "Broken pipe"),
        FileNotFoundError(2, "No such file", "/data/gloo/part-0"),
        RuntimeError("Timeout of the page at http://host/NCCL"),
        RuntimeError("a table named gloo has no rows"),
    ],
    ids=repr,
)
def test_what_no_exchange_said_is_no_lost_process(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, Group(TWO, device=CPU, seconds=1).minding():
        raise error
    assert raised.value is error


def test_a_process_that_was_told_to_end_leaves_no_word_of_a_failure() -> None:
    group = Group(TWO, device=CPU, seconds=1)
    group.tell_failure(SystemExit(75))
    assert group.first_failure() is None
    group.tell_failure(DataError("broken", remedy="mend"))
    assert group.first_failure() == "process 0 failed: broken"


def test_a_gpu_that_is_not_there_is_a_plain_error_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnavailableError, match="LOCAL_RANK is 2, and this host has 2 GPUs"):
        Group(Ranks(), device=torch.device("cuda", 2), seconds=1).join()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told: list[str] = []
    reporter = Noting()
    monkeypatch.setattr(reporter, "event", lambda name, text, data: told.append(f"{name}: {text}"))
    monkeypatch.setattr(runs, "make_reporter", lambda context: reporter)
    monkeypatch.setattr(StopSignal, "listen", lambda self, **_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    spec = divided(spec_of(DLRM), "row_wise", TABLES["dlrm"])
    spec["accelerator"] = {"kind": "gpu", "model": "h100", "count": 1}
    with pytest.raises(UnavailableError, match="finds no GPU"):
        runs.run(validate_spec(spec), console=None)
    assert [each.split(":")[0] for each in told] == ["started", "failed"]
    assert not distributed.is_initialized()


def test_a_stop_is_heard_within_an_evaluation(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = divided(spec_of(DLRM), "row_wise", TABLES["dlrm"])
    spec["train"] = {"steps": 9, "eval_every": 2}
    stop, scored, whole = StopSignal(), list[bool](), Prefetch.__next__
    work = Trainer(
        validate_spec(spec),
        reporter=Noting(),
        view=ProgressView(None, 1),
        stop=stop,
        run_dir=None,
        together=alone,
    )

    def counted(self: Any) -> Any:
        if not work._model.training:
            scored.append(True)
            stop.asked = True  # another process would be told so by any()
        return whole(self)

    monkeypatch.setattr(Prefetch, "__next__", counted)
    try:
        assert work.train() is None
    finally:
        work.close()
    assert (work.step, len(scored)) == (2, 1)  # not a batch more of either


class Told(Together):
    """One of two processes; what process 0 says goes into a list, from which the other one reads it."""

    def __init__(self, rank: int, said: list[Any]) -> None:
        super().__init__(Process(rank=rank, count=2))
        self._said = said

    def of_first(self, value: Any) -> Any:
        if self.first:
            self._said.append(value)
            return value
        return self._said.pop(0)

    def gather(self, value: Any) -> list[Any]:
        return [value, False]  # the other one sees no file of this one's


class Second(Together):
    """Process 1 of two, to which process 0 said so."""

    def __init__(self, *said: Any) -> None:
        super().__init__(Process(rank=1, count=2))
        self._said = list(said)

    def of_first(self, value: Any) -> Any:
        return self._said.pop(0)

    def gather(self, value: Any) -> list[Any]:
        return [True, value]


@pytest.mark.parametrize("what", ["all well", "another directory", "a client's own error", "may only read"])
def test_a_process_that_cannot_use_the_place_leaves_checkpoints_to_process_0(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NoCredentialsError(Exception):  # as clients of stores raise: no OSError, no TwinstepError
        pass

    def fail(error: Exception) -> Any:
        def raises(*_: Any, **__: Any) -> None:
            raise error

        return raises

    first = LocalPlace(tmp_path)
    first.put(shared_saving.SEEN, b"token")
    first.begin(f"{shared_saving.TRIAL}-token")
    if what == "a client's own error":
        monkeypatch.setattr(LocalPlace, "get", fail(NoCredentialsError("no credentials")))
    if what == "may only read":
        monkeypatch.setattr(LocalPlace, "write", fail(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(shared_saving, "StoreCrew", lambda process, _: SimpleNamespace(rank=1, count=2))
    monkeypatch.setattr(shared_saving, "FirstsTurn", lambda *_: SimpleNamespace(over=lambda: None))
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    shared = shared_saving.SharedSaving(
        validate_spec({"name": "t"}),
        tmp_path / "other" if what == "another directory" else tmp_path,
        Second(None, "token"),
        model=torch.nn.Linear(1, 1),
        optimizers={},
        stepper=SimpleNamespace(),  # type: ignore[arg-type]
        tell=lambda *_: None,
    )
    assert (shared._member is not None) == (what == "all well")


@pytest.mark.parametrize("which", ["save", "save_last"])
def test_a_disk_that_is_full_for_process_0_ends_all(
    which: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[Any] = []
    told: list[str] = []
    stepper: Any = SimpleNamespace(pull=lambda: None)

    def fail(*arguments: Any, **more: Any) -> None:
        raise UnavailableError("the disk is full", remedy="make room")

    def make(*arguments: Any, **more: Any) -> Any:
        return SimpleNamespace(save=fail, wants_last=fail, place=LocalPlace(tmp_path))

    monkeypatch.setattr(shared_saving, "Saving", make)
    monkeypatch.setattr(shared_saving, "FirstsTurn", lambda *_: SimpleNamespace(over=lambda: None))
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    for rank, message in ((0, "^the disk is full"), (1, "process 0 failed: the disk is full")):
        shared = shared_saving.SharedSaving(
            validate_spec({"name": "t"}),
            tmp_path,
            Told(rank, said),
            model=torch.nn.Linear(1, 1),
            optimizers={},
            stepper=stepper,
            tell=lambda name, text, data: told.append(name),
        )
        with pytest.raises(UnavailableError, match=message):
            shared.save(1, {}) if which == "save" else shared.save_last(1, {}, within=1.0)
    assert not said
    assert told == ["checkpoints_by_one"]
