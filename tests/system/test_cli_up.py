"""`twinstep up` as a process: says where it is, is found by its data directory, refuses what is in use, ends well."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.cli.app import run

pytestmark = pytest.mark.slow


SPEC = """
name: tiny
model: {embedding_dim: 8, transducer_dim: 16, num_layers: 1, linear_dim: 8, attention_dim: 8, hidden_dim: 16}
data: {dataset: synthetic, synthetic_events: 500, batch_size: 4, uih_len: 16, uih_budget: 12, num_candidates: 4}
train: {steps: 2}
compile: {backend: eager}
runtime: {threads: 1}
"""


AS_CHILD = Path(__file__).with_name("as_child.py")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **environ: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, str(AS_CHILD), "-m", "twinstep", "up", "--port", "0", *args],
            cwd=tmp_path,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("control plane ready: http://127.0.0.1:"), line
        return process, line.split()[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_relative_data_directory_is_found_refused_to_others_and_trains_a_real_run(
    up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    process, url = up("--data-dir", "./data")
    assert f"data in {tmp_path}/data;" in process.stdout.readline()
    monkeypatch.setenv("TWINSTEP_DATA_DIR", "data")
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert run(["submit", "spec.yaml", "--follow"]) == 0, capsys.readouterr()
    capsys.readouterr()
    assert run(["ls", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["state"], job["progress"]["step"]) == ("succeeded", 2)
    assert [path.name for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077] == ["spec.yaml"]
    assert run(["up", "--port", "0", "--data-dir", "data"]) == 2
    assert f"another control plane uses {tmp_path}/data: {url}" in capsys.readouterr().err
    assert run(["up", "--port", url.rsplit(":", 1)[1], "--data-dir", "second"]) == 2
    err = capsys.readouterr().err
    assert "cannot be used" in err
    assert "--port" in err
    assert "Traceback" not in err
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_up_quietly_and_leaves_no_address_behind(up: Any, tmp_path: Path, number: int) -> None:
    process, url = up(TWINSTEP_DATA_DIR="data")
    assert f"data in {tmp_path}/data;" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert not (tmp_path / "data" / "server.json").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5)


def test_train_refuses_a_bad_spec_before_it_loads_anything(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: x\ntrain: {steps: -1}\n")
    code = f"import sys; from twinstep.cli.app import run; code = run(['train', {str(path)!r}, '--json']);"
    code += "assert not {'torch', 'jax', 'numpy'} & set(sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["faults"][0]["field"] == "train.steps"
