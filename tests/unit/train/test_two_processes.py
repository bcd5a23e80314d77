"""Two real processes of one job, four CPU devices each: the losses of one process, of one device or eight;
one reporter, one writer; and their checkpoint goes on in one process on four devices."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinstep.spec.errors import PeerLostError, UnavailableError
from twinstep.spec.parse import validate_spec
from twinstep.spec.placement import SHARD_BYTES
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.embedding.sparsecore import fdo
from twinstep.worker.train import run as run_module
from twinstep.worker.train.processes import NAMES, Process, Together
from twinstep.worker.train.report import NoReporter
from twinstep.worker.train.sparsecore import SparseCoreStepper
from twinstep.worker.train.stop import StopSignal

DLRM = {
    "kind": "dlrm",
    "embedding_dim": 8,
    "bottom_dims": [8],
    "over_dims": [8],
    "num_cross_layers": 1,
    "cross_rank": 4,
}
DLRMV3 = {
    "embedding_dim": 8, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
    "dropout": 0.0,
}  # fmt: skip
CLICKS = {
    "dataset": "synthetic-clicks", "synthetic_events": 800, "batch_size": 16,
    "synthetic": {"table_rows": [50, 300], "max_ids": 3},
}  # fmt: skip
HISTORIES = {
    "dataset": "synthetic", "synthetic_events": 400, "batch_size": 8, "uih_len": 8, "uih_budget": 6,
    "num_candidates": 2,
}  # fmt: skip
ROOT = Path(__file__).parents[3]


def spec_of(model: dict[str, Any], engine: str, checkpoints: Path, *, devices: int, steps: int) -> dict[str, Any]:
    # Large enough that a dense step splits its rows over the devices.
    rows = {"rows": {"item_id": SHARD_BYTES // (4 * model["embedding_dim"])}} if engine == "dense" else {}
    return {
        "name": "t",
        "model": model,
        "data": CLICKS if model is DLRM else {**HISTORIES, **rows},
        "accelerator": {"kind": "cpu", "devices": devices},
        "compile": {"backend": "xla", "cache": False},
        # Adam keeps a count of steps, a tensor without dimensions; histories keep SGD, which amplifies no rounding.
        "optimizers": {"dense": {"kind": "adam", "lr": 0.01} if model is DLRM else {"kind": "sgd", "lr": 0.05}},
        "embedding": {"engine": engine},
        "train": {"steps": steps, "eval_batches": 2},
        "checkpoint": {"path": str(checkpoints), "every_steps": 2},
    }


def free_port() -> int:
    """Return a port that is free and whose next is free too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def trained(spec: dict[str, Any], folder: Path, count: int) -> list[dict[str, Any]]:
    """Train in `count` processes; return process 0's records."""
    folder.mkdir()
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    where = f"127.0.0.1:{free_port()}"
    running, logs = [], []
    for rank in range(count):
        run_dir = folder / f"process{rank}"
        run_dir.mkdir()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TWINSTEP_", "XLA_"))},
            "PYTHONPATH": str(ROOT),
            "TWINSTEP_RUN_ID": "r",
            "TWINSTEP_RUN_DIR": str(run_dir),
            "TWINSTEP_API_URL": "http://127.0.0.1:9",
            "TWINSTEP_RUN_TOKEN": "t",
        }
        if count > 1:
            environment |= dict(zip(NAMES, ("1", str(count), "0", str(rank), where), strict=True))
        log = (folder / f"log{rank}").open("w")
        logs.append(log)
        command = [sys.executable, "-m", "twinstep", "train", str(path)]
        running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [each.wait(timeout=900) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
        for log in logs:
            log.close()
    said = "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(count))
    assert codes == [0] * count, said
    assert not any((folder / f"process{rank}" / "spool.jsonl").exists() for rank in range(1, count))
    return [json.loads(line) for line in (folder / "process0" / "spool.jsonl").read_text().splitlines()]


def numbers(records: list[dict[str, Any]], name: str) -> list[float]:
    return [each["values"][name] for each in records if each["kind"] == "metric" and name in each["values"]]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("model", "engine", "devices"),
    [
        pytest.param(DLRM, "sparsecore", 8, id="dlrm-sparsecore"),
        pytest.param(DLRMV3, "sparsecore", 1, id="dlrmv3-sparsecore", marks=pytest.mark.slow),
        pytest.param(DLRMV3, "dense", 8, id="dlrmv3-dense", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_to_the_losses_of_one_which_goes_on_from_their_checkpoint(
    tmp_path: Path, model: dict[str, Any], engine: str, devices: int
) -> None:
    one = trained(spec_of(model, engine, tmp_path / "one", devices=devices, steps=6), tmp_path / "alone", 1)
    saved = tmp_path / "two"
    two = trained(spec_of(model, engine, saved, devices=8, steps=4), tmp_path / "together", 2)
    assert numbers(two, "loss") == pytest.approx(numbers(one, "loss")[:4], rel=1e-5)
    where = open_place(saved)
    tensors = Reader(where, max(where.names())).manifest.tensors
    assert {piece.file[:9] for entry in tensors.values() for piece in entry.pieces} == {"data-0000", "data-0001"}
    if engine == "dense":  # a table that is split by rows over devices is written by the processes that have them
        split = [entry.pieces for path, entry in tensors.items() if len(entry.pieces) > 1]
        assert split
        assert all({piece.file[:9] for piece in pieces} == {"data-0000", "data-0001"} for pieces in split)
    # The same place, more steps, other devices: it goes on where the first attempt ended.
    more = trained(spec_of(model, engine, saved, devices=4, steps=6), tmp_path / "again", 1)
    assert numbers(more, "loss") == pytest.approx(numbers(one, "loss")[4:], rel=1e-5)
    assert numbers(more, "eval/log_loss")[-1] == pytest.approx(numbers(one, "eval/log_loss")[-1], rel=1e-4)


def test_a_process_knows_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert Process.from_environment() == Process()
    given = dict(zip(NAMES, ("2", "4", "1", "3", "first.pods:8482"), strict=True))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Process.from_environment() == Process(rank=7, count=8, coordinator="first.pods:8482")
    monkeypatch.delenv("TWINSTEP_HOST")
    with pytest.raises(UnavailableError, match="lacks TWINSTEP_HOST"):
        Process.from_environment()
    for wrong in ("4", "-1", "x"):
        monkeypatch.setenv("TWINSTEP_HOST", wrong)
        with pytest.raises(UnavailableError, match="names no process"):
            Process.from_environment()


PART = """
import sys
from twinstep.worker.train.processes import Process, Together
rank, port = int(sys.argv[1]), sys.argv[2]
together = Together(Process(rank=rank, count=2, coordinator=f"127.0.0.1:{port}"))
together.join()
try:
    together.gather(rank)
    if rank == int(sys.argv[3]):
        raise ValueError("this one fails")
    together.gather(rank)
except Exception as error:
    together.tell_failure(error)
    sys.exit(7 if isinstance(error, ValueError) else 9)
finally:
    together.leave()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_with_its_own_code_and_takes_the_other_along(failing: int) -> None:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([sys.executable, "-c", PART, str(rank), str(port), str(failing)], env=environment)
        for rank in range(2)
    ]
    try:
        # JAX alone would wait for the other process, which waits for this one, for 300 s.
        codes = [each.wait(timeout=280) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert codes[failing] == 7
    assert codes[1 - failing] != 0


def test_what_jax_says_of_a_process_that_is_gone_is_a_lost_one_and_no_bug() -> None:
    said = (
        "FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce failed: "
        "[external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    )
    second = Together(Process(rank=1, count=2, coordinator="h:1"))
    with pytest.raises(PeerLostError, match="process 1 lost touch with another one of this run's 2"), second.minding():
        raise RuntimeError(said)
    for process, error in ((Process(), said), (Process(rank=1, count=2, coordinator="h:1"), "shapes differ")):
        with pytest.raises(RuntimeError, match=error[:6]), Together(process).minding():
            raise RuntimeError(error)


def test_what_goes_wrong_in_parting_does_not_hide_how_a_run_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> None:
        raise RuntimeError("a barrier failed")

    called: list[str] = []
    monkeypatch.setattr("torch.distributed.is_initialized", breaks)
    monkeypatch.setattr("twinstep.worker.compile.processes.leave", breaks)
    monkeypatch.setattr("twinstep.worker.compile.processes.abandon", lambda: called.append("abandon"))
    together = Together(Process(rank=0, count=2, coordinator="h:1"))
    together.leave()
    assert caplog.text.count("a barrier failed") == 2
    together.tell_failure(SystemExit(75))
    together.leave()
    assert not called
    together.tell_failure(ValueError())
    together.leave()
    assert called == ["abandon"]


def test_a_run_that_cannot_part_has_reported_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Together):
        def join(self) -> None:
            raise UnavailableError("nobody came", remedy="wait")

        def leave(self) -> None:
            raise OSError("nor can it leave")

    class Heard(NoReporter):
        def close(self) -> None:
            said.append("closed")
            raise OSError("nor can it report")

    said: list[str] = []
    monkeypatch.setattr(run_module, "processes", lambda _: Lost(Process()))
    monkeypatch.setattr(run_module, "make_reporter", lambda _: Heard())
    monkeypatch.setattr(run_module, "flush_output", lambda: said.append("flushed"))
    monkeypatch.setattr(StopSignal, "listen", lambda _, **__: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(OSError, match="nor can it"):
        run_module.run(validate_spec({"name": "t"}), console=None)
    assert said == ["closed", "flushed"]


def test_statistics_of_limits_are_those_of_all_processes_before_and_after_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(*values: int) -> fdo.Record:
        found = fdo.Record("t", batches=len(values), sketches={"stack": {each: fdo.Sketch() for each in fdo.FIELDS}})
        for value, sketch in itertools.product(values, found.sketches["stack"].values()):
            sketch.add(value)
        return found

    steppers: list[Any] = []

    class Both(Together):
        def gather(self, _: Any) -> list[Any]:
            return [each._record.to_json() for each in steppers]

    monkeypatch.setattr(SparseCoreStepper, "_take_limits", lambda *_: None)
    wanted = SimpleNamespace(limits=SimpleNamespace(source="fdo"), overflow="error")
    for rank, mine in enumerate((record(8, 16), record(64))):
        stepper: Any = object.__new__(SparseCoreStepper)
        stepper._record, stepper._together = mine, Both(Process(rank=rank, count=2))
        stepper._plan = SimpleNamespace(stacks=[], with_limits=lambda *_: None)
        stepper._spec = SimpleNamespace(embedding=wanted)
        steppers.append(stepper)
    whole = record(8, 16, 64).to_json()
    saved = [each.state() for each in steppers]
    assert [each["sparsecore"]["record"] for each in saved] == [whole, whole]
    for each in steppers:
        each._record = fdo.Record("t")
        each.restore(saved[0])
    assert steppers[1]._record.batches == 0
    assert [each.state()["sparsecore"]["record"] for each in steppers] == [whole, whole]
