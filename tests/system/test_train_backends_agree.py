"""One spec, three backends: Inductor and XLA give eager's loss curve, and a run's files hold what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEPS = 20


def run(tmp_path: Path, backend: str, **changes: Any) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Train examples/ml-100k.yaml for a few steps as a run of a control plane that is away; return its spool."""
    spec = yaml.safe_load((ROOT / "examples/ml-100k.yaml").read_text())
    spec["compile"] = {"backend": backend, "cache": False}
    spec["train"] = {"steps": STEPS, "eval_batches": 4, **changes.pop("train", {})}
    spec |= changes
    run_dir = tmp_path / backend
    run_dir.mkdir()
    path = run_dir / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    found = subprocess.run(
        [sys.executable, "-m", "twinstep", "train", str(path)],
        env=environment(run_dir), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    return found, spooled(run_dir)


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


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["values"]["loss"] for record in records if "loss" in record.get("values", {})]


@pytest.fixture(scope="module")
def eager_curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found, records = run(tmp_path_factory.mktemp("eager"), "eager")
    assert found.returncode == 0, found.stderr
    return losses(records)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_a_compiled_run_gives_the_eager_loss_curve(tmp_path: Path, backend: str, eager_curve: list[float]) -> None:
    found, records = run(tmp_path, backend)
    assert found.returncode == 0, found.stderr
    curve = losses(records)
    assert len(curve) == len(eager_curve) == STEPS
    assert curve == pytest.approx(eager_curve, rel=1e-4)
    assert max(eager_curve) - min(eager_curve) > 0.01, "a curve that does not move compares nothing"
    compiles = [record for record in records if record.get("name") == "compiled"]
    assert [each["data"]["reason"] for each in compiles] == ["first compile"]
    assert compiles[0]["data"]["seconds"] > 0
    results = [record["summary"] for record in records if record["kind"] == "result"]
    assert [each["backend"] for each in results] == [backend]
    assert results[0]["compile_s"] > 0
    assert "Traceback" not in found.stdout + found.stderr


def test_records_of_a_run_are_numbered_without_a_gap_and_end_with_done(tmp_path: Path) -> None:
    found, records = run(tmp_path, "eager", train={"steps": 3, "eval_every": 2, "eval_batches": 1})
    assert found.returncode == 0, found.stderr
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert records[-1]["kind"] == "progress"
    assert records[-1]["phase"] == "done"
    assert [record["data"]["step"] for record in records if record.get("name") == "evaluated"] == [2, 3]


def test_a_loss_that_is_not_finite_fails_the_run_and_names_the_step(tmp_path: Path) -> None:
    wild = {"dense": {"kind": "sgd", "lr": 1e30}, "sparse": {"kind": "sgd", "lr": 1e30}}
    found, records = run(tmp_path, "eager", optimizers=wild)
    assert found.returncode == 1
    assert "the loss of step" in found.stderr
    assert "Traceback" not in found.stderr
    failed = [record for record in records if record.get("name") == "failed"]
    assert len(failed) == 1
    assert "lower optimizers.dense.lr" in failed[0]["reason"]


def test_sigterm_ends_a_run_between_steps_and_says_so(tmp_path: Path) -> None:
    spec = {"name": "long", "data": {"dataset": "synthetic", "batch_size": 4}, "compile": {"backend": "eager"},
            "train": {"steps": 100_000}}  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
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
        worker.send_signal(signal.SIGTERM)
        output = worker.communicate(timeout=60)[0].decode()
    finally:
        worker.kill()
    assert worker.returncode == 128 + signal.SIGTERM, output
    stopped = [record for record in spooled(tmp_path) if record.get("name") == "stopped"]
    assert len(stopped) == 1
    assert stopped[0]["data"]["step"] >= 1
    assert "Traceback" not in output


def test_the_same_seed_gives_the_same_curve_bit_for_bit(tmp_path: Path, eager_curve: list[float]) -> None:
    _, records = run(tmp_path, "eager")
    assert losses(records) == eager_curve


def test_a_saved_graph_stands_beside_the_runs_files_and_the_time_of_compiling_apart(tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "examples/smoke.yaml").read_text())
    spec |= {"compile": {"backend": "xla", "cache": False}, "train": {"steps": 2}, "debug": {"save_graph": True}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    found = subprocess.run(
        [sys.executable, "-m", "twinstep", "train", str(tmp_path / "spec.yaml"), "--json"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)["summary"]
    assert summary["compile_s"] > 0
    graphs = list(tmp_path.glob("graph-*.txt"))
    assert len(graphs) == 1
    assert "torch.ops.aten.mul.Tensor" in graphs[0].read_text()


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
