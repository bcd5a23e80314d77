"""Ranks under Ray: what each one's process is told, who counts as the first to fail, and how the job then ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import ray_job, ray_rank
from twinstep.worker.train.environment import previous_worker
from twinstep.worker.train.heartbeat import Heartbeat
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.ray_board import LEFT, Board, Ended, outcome
from twinstep.worker.train.ray_job import PROCESSES, SPEC, Asked, main
from twinstep.worker.train.ray_rank import REPORTING, rank_environment

GPU = """
name: a-job
accelerator: {kind: gpu, model: h100, count: 4}
compile: {backend: inductor}
"""


def ended(rank: int, code: int, words: str = "") -> Ended:
    return Ended(rank=rank, code=code, words=words)


ENDS = st.lists(st.tuples(st.integers(0, 7), st.sampled_from((0, 1, 2, 75, 76, 134, 137, 139, 143))), max_size=8)


@given(pairs=ENDS, ray_said=st.sampled_from(("", "it broke")))
def test_the_exit_code_is_that_of_the_first_failure_and_zero_only_if_all_ended_well(
    pairs: list[tuple[int, int]], ray_said: str
) -> None:
    ends = [ended(rank, code) for rank, code in dict(pairs).items()]
    code, why = outcome(ends, 8, ray_said=ray_said)
    failed = [each.code for each in ends if each.code not in (0, *LEFT)]
    if failed:
        assert code == next((each for each in failed if each not in (134, 76)), 134 if 134 in failed else 76)
    assert (code == 0) == (len(ends) == 8 and not any(each.code for each in ends) and not ray_said)
    assert bool(why) == (code not in (0, *LEFT))


def test_the_first_failing_ranks_words_are_the_jobs() -> None:
    ends = [ended(0, 0), ended(3, 2, "the spec is wrong\n"), ended(1, 1, "lost touch with another one")]
    assert outcome(ends, 4) == (2, "rank 3 of 4 failed first, with exit code 2: the spec is wrong")
    code, why = outcome(ends[:1], 3, ray_said="the node died")
    assert code == 1
    assert why == "rank 1, 2 of 3 ended without a word: the node died"


def test_a_crash_by_sigabrt_is_named_though_another_rank_missed_it_sooner() -> None:
    ends = [ended(1, 76, "lost touch with another one"), ended(0, 134, "double free or corruption")]
    assert outcome(ends, 2) == (134, "rank 0 of 2 failed first, with exit code 134: double free or corruption")
    assert outcome([*ends, ended(2, 1, "a shard is damaged")], 3)[0] == 1, "NCCL aborts ranks too"
    assert outcome([ends[0], ended(0, 75)], 2)[0] == 76


def test_ranks_that_left_are_no_failure_and_the_least_saved_decides() -> None:
    assert outcome([ended(0, 75), ended(1, 75)], 2) == (75, "")
    assert outcome([ended(0, 75), ended(1, 143)], 2, ray_said="aborted") == (143, "")


def test_one_end_takes_the_others_along_unless_it_is_a_good_one() -> None:
    for code, stops, fails in ((0, False, False), (75, True, False), (1, True, True)):
        board = Board()
        board.end(ended(0, code))
        assert board.orders() == (stops, fails)
    board = Board()
    board.ask()
    assert board.orders() == (True, False)
    assert board.ends() == []


def test_only_rank_0_reports_and_threads_are_shared_out() -> None:
    base = {**dict.fromkeys(REPORTING, "x"), "OMP_NUM_THREADS": "1", "HOME": "/h"}
    first, second = (Ranks(rank=rank, size=4, local=rank % 2, on_host=2, address="a", port=1) for rank in (0, 3))
    assert set(REPORTING) <= set(rank_environment(base, first, processors=9))
    told = rank_environment(base, second, processors=9)
    assert not set(REPORTING) & set(told)
    assert Ranks.from_environment(told) == second
    assert (told["OMP_NUM_THREADS"], told["HOME"]) == ("4", "/h")


def test_the_environment_names_spec_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    monkeypatch.delenv(PROCESSES, raising=False)
    monkeypatch.delenv(SPEC, raising=False)
    with pytest.raises(UnavailableError, match="TWINSTEP_SPEC is not set"):
        Asked.from_environment()
    monkeypatch.setenv(SPEC, str(path))
    with pytest.raises(UnavailableError, match="cannot be read"):
        Asked.from_environment()
    path.write_text(GPU)
    assert Asked.from_environment().processes == 4
    monkeypatch.setenv(PROCESSES, "8")
    with pytest.raises(SpecError, match="asks for 4 GPUs"):
        Asked.from_environment()
    path.write_text("name: a-job\n")
    assert Asked.from_environment().processes == 8
    for wrong in ("0", "-1", "two"):
        monkeypatch.setenv(PROCESSES, wrong)
        with pytest.raises(UnavailableError, match=PROCESSES):
            Asked.from_environment()


def test_what_the_user_has_to_mend_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"):
        monkeypatch.setenv(name, "0")
    path = tmp_path / "job.yaml"
    path.write_text("name: a-job\nno_such_field: 1\n")
    monkeypatch.setenv(SPEC, str(path))
    assert main() == 2
    assert "no_such_field" in capsys.readouterr().err
    monkeypatch.delenv(SPEC)
    assert main() == 1


class Remote:
    """Stands for an actor's method."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


def on_head(monkeypatch: pytest.MonkeyPatch, going: Callable[[], list[str]]) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("ray._private.state.state.get_draining_nodes", lambda: dict.fromkeys(going(), 0))
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))


@pytest.mark.parametrize(
    ("going", "of_run"), [([], []), (["other"], []), (["other", "second"], ["second"]), (["head"], ["head"])]
)
def test_a_node_that_is_to_go_stops_the_run_only_if_it_is_one_of_the_runs(
    going: list[str], of_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    for rank, node in enumerate(("first", "second", "second")):
        board.stand(rank, node)
    on_head(monkeypatch, lambda: going)
    assert ray_job._going_of(SimpleNamespace(nodes=Remote(board.nodes))) == set(of_run)


def test_a_ray_that_does_not_say_which_nodes_are_to_go_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")

    def gone() -> None:
        raise AttributeError("no such thing in this version")

    monkeypatch.setattr("ray._private.state.state.get_draining_nodes", gone)
    for _ in range(3):
        assert ray_job._going_of(None) == set()
    assert [each.message for each in caplog.records].count(
        "whether a node is to go cannot be seen: AttributeError: no such thing in this version"
    ) == 1


class Group:
    """Stands for Ray Train: a group of ranks that ends as it is told, once it is asked to or by itself."""

    def __init__(self, board: Board, ends: list[int], *, by_itself: bool = False) -> None:
        self.board, self.ends, self.by_itself = board, ends, by_itself
        self.asked = threading.Event()

    def fit(self) -> None:
        assert self.by_itself or self.asked.wait(30)
        for rank, code in enumerate(self.ends):
            self.board.end(ended(rank, code, "out of luck"))
        if any(code not in (0, *LEFT) for code in self.ends):
            raise RuntimeError("the group ended")


@pytest.mark.parametrize(
    ("groups", "going", "code", "started"),
    [
        ([([0, 0], [])], {}, 0, 1),
        ([([75, 75], ["node"]), ([75, 75], ["node"]), ([0, 0], [])], {"node": 5}, 0, 3),  # twice, and on to the end
        ([([75, 75], ["head"])], {"head": 5}, 75, 1),  # the driver goes with its node
        ([([75], ["node"]), ([0, 0], [])], {"node": 5}, 0, 2),  # a node was gone before its rank's end was heard of
        ([([75], ["head"])], {"head": 5}, 75, 1),
        ([([75, 137], ["node"])], {"node": 5}, 137, 1),  # a rank that could not save has failed
        ([([75, 75], ["node"]), ([75, 1], [])], {"node": 5}, 1, 2),
    ],
)
def test_ranks_whose_node_is_taken_away_start_again_within_the_job(
    groups: list[tuple[list[int], list[str]]], going: dict[str, int], code: int, started: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray")
    left, now, told = list(groups), [], []  # type: list[Any], list[str], list[str]
    on_head(monkeypatch, lambda: list(now))
    looks = iter(range(10**6))

    def nodes() -> list[dict[str, Any]]:
        """The node is replaced after two looks."""
        if next(looks) % 3 == 2:
            now.clear()
        alive = [{"NodeID": "head", "Alive": True, "Resources": {}}]
        return alive if now else [*alive, {"NodeID": "new", "Alive": True, "Resources": {"CPU": 2.0}}]

    def attempt(asked: Asked, stop: threading.Event, **more: str) -> tuple[int, str, bool, int | None]:
        told.append(more["told"])
        ends, goes = left.pop(0)
        now[:] = goes
        board = Board()
        for rank in range(2):
            board.stand(rank, goes[0] if goes else "new")
        group = Group(board, ends, by_itself=not goes)

        def ask() -> None:
            board.ask()
            group.asked.set()

        said, node = ray_job._fit(group, SimpleNamespace(nodes=Remote(board.nodes), ask=Remote(ask)), stop)
        found, why = outcome(board.ends(), 2, ray_said=said, gone=board.on(node))
        return found, why, bool(node) and not stop.is_set(), len(told) * 10

    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray_job, "_attempt", attempt)
    monkeypatch.setattr(ray_job, "_connected", contextlib.nullcontext)
    monkeypatch.setattr(ray_job, "LOOK", 0.01)
    monkeypatch.setattr(ray_job, "LOOK_AT_NODES", 0.02)
    spec = validate_spec({"name": "t", "embedding": {"engine": "torchrec"}, "compile": {"backend": "eager"}})
    assert ray_job.train(Asked(spec=spec, processes=2))[0] == code
    assert len(told) == started
    assert told[0] == ""
    for count, text in enumerate(told[1:], 1):
        monkeypatch.setenv("TWINSTEP_RESTART", text)
        before = previous_worker()
        assert before is not None
        assert (before.count, before.step, before.reason) == (count, count * 10, "the node of a rank was taken away")


def test_a_second_sigterm_while_ray_is_left_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have saved by then, and the exit code says so; leaving Ray takes seconds."""
    heard: list[int] = []

    @contextlib.contextmanager
    def connected() -> Iterator[None]:
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(-number))  # as Ray does
        yield
        signal.raise_signal(signal.SIGTERM)

    def attempt(asked: Asked, stop: threading.Event, **_: str) -> tuple[int, str, bool, int | None]:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        return 75, "", False, None

    monkeypatch.setattr(ray_job, "_connected", connected)
    monkeypatch.setattr(ray_job, "_attempt", attempt)
    asked = Asked(spec=validate_spec({"name": "t", "embedding": {"engine": "torchrec"}}), processes=2)
    before = signal.getsignal(signal.SIGTERM)

    def ours(number: int, _: object) -> None:
        heard.append(number)

    try:
        signal.signal(signal.SIGTERM, ours)
        assert ray_job.train(asked) == (75, "")
        assert signal.getsignal(signal.SIGTERM) is ours
        assert ray_job.train(asked, ends_process=True) == (75, "")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "till the process is gone"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == []


WORKER = """
import sys
from twinstep.worker.train import ray_rank
sys.executable = sys.argv[1]
child = ray_rank._start("a spec", {})
print(child.pid, flush=True)
child.wait()
"""


def test_the_step_that_rank_0_has_done_goes_to_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(ray_rank, "POLL", 0.01)
    board = Board()
    there = SimpleNamespace(done=Remote(board.done), orders=Remote(board.orders))
    for run_dir, step in ((None, None), (tmp_path, None), (tmp_path, 7)):
        heart = Heartbeat(run_dir)
        if step is not None:
            heart.beat("training", step)
        heart.close()
        with subprocess.Popen(["sleep", "0.1"], text=True) as child:
            ray_rank._wait(child, there, run_dir)
        assert board.step() == step


def test_a_worker_that_nobody_knows_the_steps_of_is_told_of_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSTEP_RESTART", '{"count": 2, "reason": "gone", "step": null}')
    before = previous_worker()
    assert before is not None
    assert (before.count, before.step) == (2, None)


def test_a_rank_ends_with_its_worker_when_ray_kills_that(tmp_path: Path) -> None:
    rank = tmp_path / "rank"
    rank.write_text("#!/bin/sh\nexec sleep 900\n")
    rank.chmod(0o700)
    command = [sys.executable, "-c", WORKER, str(rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as worker:
        try:
            assert worker.stdout is not None
            handle = os.pidfd_open(int(worker.stdout.readline()))
            worker.kill()
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            ended = poll.poll(300e3)
            os.close(handle)
            assert ended, "a rank outlived its worker"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def test_the_port_of_a_group_is_kept_for_rank_0_until_it_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    backend = pytest.importorskip("twinstep.worker.train.ray_backend", reason="Ray Train imports pandas")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    try:
        _, before = backend._place()
        host, port = backend._place()
        socket.create_server((host, before), reuse_port=False).close()  # the group's before is free again
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        store = TCPStore(host, port, 1, True, multi_tenant=True)
        store.set("a", "b")
        assert store.get("a") == b"b"
    finally:
        while backend._HELD:
            backend._HELD.pop().close()
