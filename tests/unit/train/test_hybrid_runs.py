"""Runs of several processes as a user meets them: `twinstep train --processes`, ends of all kinds, other engines."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hybrid_child
from test_hybrid_parallel import DLRM, STEPS, TABLES, assert_equal, divided, in_processes, spec_of

from twinstep.spec.parse import validate_spec
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader

LIMIT = 600.0
pytestmark = pytest.mark.timeout(1500)
ENDLESS = 1_000_000


@contextmanager
def training(folder: Path, spec: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Start `twinstep train` in two processes, and wait until it has stepped."""
    path, run = folder / "spec.json", folder / "run"
    run.mkdir(exist_ok=True)
    path.write_text(json.dumps(spec))
    environment = os.environ | {
        "TWINSTEP_RUN_ID": "run",
        "TWINSTEP_RUN_DIR": str(run),
        "TWINSTEP_API_URL": "http://127.0.0.1:9",
        "TWINSTEP_RUN_TOKEN": "none",
    }
    command = [sys.executable, "-m", "twinstep", "train", str(path), "--processes", "2"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            end = time.monotonic() + LIMIT
            while not any(each.get("step", 0) >= 5 for each in records(run) if each["kind"] == "metric"):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def records(run: Path) -> list[dict[str, Any]]:
    spool = run / "spool.jsonl"
    lines = spool.read_text().splitlines() if spool.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(launcher: int) -> list[int]:
    """Return the pids of a launcher's processes, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for pid in map(int, children):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks[next(int(each[5:]) for each in environment if each.startswith(b"RANK="))] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def writers(place: Path) -> dict[str, int]:
    """Return how many processes wrote the newest checkpoint's tensors, by kind; each has files of its own."""
    where = open_place(place)
    found: dict[str, set[str]] = {}
    for path, entry in Reader(where, max(where.names())).manifest.tensors.items():
        found.setdefault(path.split(":")[0], set()).update(piece.file[:9] for piece in entry.pieces)
    return {kind: len(files) for kind, files in found.items()}


def endless(**parts: Any) -> dict[str, Any]:
    spec = divided(spec_of(DLRM, **parts), "row_wise", TABLES["dlrm"])
    spec["train"] = {"steps": ENDLESS}
    return spec


def test_a_killed_process_ends_the_run_soon_with_a_plain_error(tmp_path: Path) -> None:
    with training(tmp_path, endless()) as process:
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        out, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 137
    assert "process 1 of this run ended with code 137; the others are stopped" in error
    assert "lost touch with another one of this run's 2" in error
    assert "Traceback" not in error + out
    failed = [each for each in records(tmp_path / "run") if each.get("name") == "failed"]
    assert ["lost touch" in each["reason"] for each in failed] == [True]  # rank 0's word, once


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_kill_of_any_process_at_any_moment_leaves_a_whole_checkpoint_to_go_on_from(seed: int, tmp_path: Path) -> None:
    dice, place = random.Random(seed), tmp_path / "kept"
    spec = divided(spec_of(DLRM, checkpoint={"path": str(place), "every_steps": 2}), "row_wise", TABLES["dlrm"])
    spec["train"] = {"steps": 600}
    with training(tmp_path, spec) as process:
        time.sleep(dice.random() * 0.3)  # into a step, an exchange, or a checkpoint that both are writing
        os.kill(ranks_of(process.pid)[seed % 2], signal.SIGKILL)
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 137, error
    whole = open_place(place)
    step = Reader(whole, max(whole.names())).manifest.step
    spec["train"]["steps"] = step + 10
    (found,) = in_processes(tmp_path, [spec])
    alone = {name: part for name, part in spec.items() if name not in ("checkpoint", "embedding")}
    wanted = hybrid_child.train(validate_spec(alone))
    assert found["losses"] == pytest.approx(wanted["losses"][step:], rel=1e-4)
    assert not list(place.glob(".draft-*"))


def test_a_stopped_run_saves_once_and_goes_on_in_one_process_of_another_engine(tmp_path: Path) -> None:
    places = {"checkpoint": {"path": str(tmp_path / "kept")}}
    with training(tmp_path, endless(**places)) as process:
        process.terminate()
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, error
    saved = [each for each in records(tmp_path / "run") if each.get("name") == "checkpoint_saved"]
    assert len(saved) == 1
    step = saved[0]["data"]["step"]
    spec = spec_of(DLRM, **places)
    spec["train"] = {"steps": step + 2}
    assert len(hybrid_child.train(validate_spec(spec))["losses"]) == 2


@pytest.mark.parametrize("first", ["divided", "dense"])
def test_a_run_moves_between_engines_and_numbers_of_processes(first: str, tmp_path: Path) -> None:
    places = {"checkpoint": {"path": str(tmp_path / "kept"), "every_steps": 20}}
    half, rest, oracle = (spec_of(DLRM, **more) for more in (places, places, {}))
    for each in (half, rest, oracle):
        each["train"] = {"steps": STEPS}
    half["train"] = {"steps": 20}
    whole = hybrid_child.train(validate_spec(oracle))
    if first == "divided":
        in_processes(tmp_path, [divided(half, "row_wise", TABLES["dlrm"])])
        assert writers(tmp_path / "kept") == {"parameter": 2, "optimizer": 2, "buffer": 1, "random": 1}
        found = hybrid_child.train(validate_spec(rest))
    else:
        hybrid_child.train(validate_spec(half))
        found = in_processes(tmp_path, [divided(rest, "table_wise", TABLES["dlrm"])])[0]
    assert len(found["losses"]) == STEPS - 20
    found["losses"] = whole["losses"][:20] + found["losses"]
    assert_equal(found, whole)
