"""One spec, three backends: Inductor and XLA give eager's loss curve, and a run's files hold what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEPS = 20


@dataclass(frozen=True)
class Ended:
    """What is left of a run."""

    code: int
    said: str
    records: list[dict[str, Any]]

    def losses(self) -> list[float]:
        return [record["values"]["loss"] for record in self.records if "loss" in record.get("values", {})]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("name") == name]


def spec(backend: str, **changes: Any) -> dict[str, Any]:
    """examples/ml-100k.yaml for a few steps."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples/ml-100k.yaml").read_text())
    found["compile"] = {"backend": backend, "cache": False}
    found["train"] = {"steps": STEPS, "eval_batches": 4, **changes.pop("train", {})}
    return found | changes


def train(place: Path, **specs: dict[str, Any]) -> dict[str, Ended]:
    """Train specs one after the other in one process, as runs of a control plane that is away."""
    for name, each in specs.items():
        (place / name).mkdir()
        (place / name / "spec.yaml").write_text(yaml.safe_dump(each))
    found = subprocess.run(
        [sys.executable, Path(__file__).with_name("train_here.py"), *(place / name for name in specs)],
        env=environment(place), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    ended = {}
    for name in specs:
        end = json.loads((place / name / "ended.json").read_text())
        ended[name] = Ended(end["code"], end["out"] + end["err"], spooled(place / name))
    return ended


def environment(run_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        "TWINSTEP_RUN_ID": "run-test",
        "TWINSTEP_RUN_DIR": str(run_dir),
        "TWINSTEP_API_URL": "http://127.0.0.1:9",  # the discard port: nobody listens
        "TWINSTEP_RUN_TOKEN": "none",
    }


def spooled(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "spool.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    wild = {"dense": {"kind": "sgd", "lr": 1e30}, "sparse": {"kind": "sgd", "lr": 1e30}}
    return train(
        tmp_path_factory.mktemp("eager"),
        curve=spec("eager"),
        short=spec("eager", train={"steps": 3, "eval_every": 2, "eval_batches": 1}),
        again=spec("eager"),
        wild=spec("eager", optimizers=wild),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_a_compiled_run_gives_the_eager_loss_curve(tmp_path: Path, backend: str, eager: dict[str, Ended]) -> None:
    run = train(tmp_path, run=spec(backend, debug={"save_graph": True}))["run"]
    expected = eager["curve"].losses()
    assert run.code == 0, run.said
    assert len(run.losses()) == len(expected) == STEPS
    assert run.losses() == pytest.approx(expected, rel=1e-4)
    assert max(expected) - min(expected) > 0.01, "a curve that does not move compares nothing"
    compiles = run.events("compiled")
    assert [each["data"]["reason"] for each in compiles] == ["first compile"]
    assert compiles[0]["data"]["seconds"] > 0
    results = [record["summary"] for record in run.records if record["kind"] == "result"]
    assert [each["backend"] for each in results] == [backend]
    assert results[0]["compile_s"] > 0
    graphs = list((tmp_path / "run").glob("graph-*.txt"))
    assert [path.name for path in graphs] == [each["data"]["file"] for each in run.events("graph_saved")]
    assert len(graphs) == 1
    assert "torch.ops.aten.mul.Tensor" in graphs[0].read_text()
    assert "Traceback" not in run.said


def test_records_of_a_run_are_numbered_without_a_gap_and_end_with_done(eager: dict[str, Ended]) -> None:
    run = eager["short"]
    assert run.code == 0, run.said
    assert [record["seq"] for record in run.records] == list(range(1, len(run.records) + 1))
    assert run.records[-1]["kind"] == "progress"
    assert run.records[-1]["phase"] == "done"
    assert [record["data"]["step"] for record in run.events("evaluated")] == [2, 3]


def test_a_loss_that_is_not_finite_fails_the_run_and_names_the_step(eager: dict[str, Ended]) -> None:
    run = eager["wild"]
    assert run.code == 1
    assert "the loss of step" in run.said
    assert "Traceback" not in run.said
    (failed,) = run.events("failed")
    assert "lower optimizers.dense.lr" in failed["reason"]


def test_the_same_seed_gives_the_same_curve_bit_for_bit_whatever_ran_before(eager: dict[str, Ended]) -> None:
    assert eager["curve"].code == 0, eager["curve"].said
    assert eager["again"].losses() == eager["curve"].losses()
    assert len(eager["again"].losses()) == STEPS


def test_sigterm_ends_a_run_between_steps_and_says_so_however_often_it_comes(tmp_path: Path) -> None:
    long = {"name": "long", "data": {"dataset": "synthetic", "batch_size": 4}, "compile": {"backend": "eager"},
            "train": {"steps": 100_000}, "checkpoint": {"path": str(tmp_path / "place")}}  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(long))
    worker = subprocess.Popen(
        [sys.executable, "-m", "twinstep", "train", str(tmp_path / "spec.yaml")],
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and worker.poll() is None:
            spool = tmp_path / "spool.jsonl"
            if spool.exists() and '"kind": "metric"' in spool.read_text():
                break
            time.sleep(0.1)
        deadline = time.monotonic() + 60
        while worker.poll() is None and time.monotonic() < deadline:
            worker.send_signal(signal.SIGTERM)  # the last of them while the interpreter ends
            time.sleep(0.002)
        output = worker.communicate(timeout=60)[0].decode()
    finally:
        worker.kill()
    assert worker.returncode == 75, output
    stopped = [record for record in spooled(tmp_path) if record.get("name") == "stopped"]
    assert len(stopped) == 1
    assert stopped[0]["data"]["step"] >= 1
    assert "Traceback" not in output


# RLIMIT_FSIZE is a full disk: of the spool, and of the log that standard output goes to.
FULL_DISK = """
import resource, sys
import torch  # its caches are none of the run's
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sys.argv = ["twinstep", "train", sys.argv[1]]
from twinstep.cli import main
main()
"""


def test_a_run_on_a_full_disk_trains_to_its_end_and_succeeds(tmp_path: Path) -> None:
    small = yaml.safe_load((ROOT / "examples/smoke.yaml").read_text())
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "log").write_bytes(b"x" * 2900)  # what was written before the disk was full
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, tmp_path / "spec.yaml"],
            env=environment(tmp_path), stdout=log, stderr=log, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (tmp_path / "log").read_text()[2900:]
    records = spooled(tmp_path)
    assert 5 < len(records) < 20 + 4, "not all of them found room"
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))


def closed_pipe() -> IO[str]:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk() -> IO[str]:
    return Path("/dev/full").open("w")


@pytest.mark.parametrize(("to", "more"), [(full_disk, []), (full_disk, ["--json"]), (closed_pipe, [])])
def test_a_run_whose_output_nobody_can_read_has_succeeded_all_the_same(
    tmp_path: Path, to: Callable[[], IO[str]], more: list[str]
) -> None:
    small = yaml.safe_load((ROOT / "examples/smoke.yaml").read_text())
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(small | {"compile": {"backend": "eager"}}))
    with to() as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "twinstep", "train", tmp_path / "spec.yaml", *more],
            env=environment(tmp_path), stdout=nobody, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [record["kind"] for record in spooled(tmp_path)].count("result") == 1


# What is there already (PyTorch's libraries, threads' stacks) is counted too, so the limit is set on top of it.
LITTLE_MEMORY = """
import re, resource, sys
from pathlib import Path
import twinstep.worker.train.run
size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 400 * 2**20, -1))
sys.argv = ["twinstep", "train", sys.argv[1]]
from twinstep.cli import main
main()
"""


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"embedding_dim": 8}, {"batch_size": 65536, "uih_len": 8192}),
        ({"embedding_dim": 256}, {"batch_size": 4, "rows": {"user_id": 1_000_000}}),
    ],
    ids=["batch", "table"],
)
def test_a_run_that_memory_does_not_hold_says_so_and_what_to_make_smaller(
    tmp_path: Path, model: dict[str, int], data: dict[str, object]
) -> None:
    small = yaml.safe_load((ROOT / "examples/smoke.yaml").read_text())
    small["model"] |= model
    small["data"] |= {"dataset": "synthetic", "synthetic_events": 500} | data
    small["compile"] = {"backend": "eager"}
    small["runtime"] = {"threads": 1}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(small))
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, tmp_path / "spec.yaml"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: the run does not fit in this machine's memory" in done.stderr
    assert "data.batch_size" in done.stderr
    assert "Traceback" not in done.stderr
    (failed,) = [record for record in spooled(tmp_path) if record.get("name") == "failed"]
    assert failed["data"]["code"] == "train_failed"


def test_training_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: a\ndata: {dataset: synthetic}\n")
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['twinstep', 'train', {str(tmp_path / 'spec.yaml')!r}]\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code + "from twinstep.cli import main; main()"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert "torch" in found.stderr
    assert "pip install" in found.stderr
    assert "Traceback" not in found.stderr
