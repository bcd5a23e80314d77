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

pytestmark = pytest.mark.slow


def command(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twinstep", *args],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinstep", "up", "--port", "0", "--data-dir", str(tmp_path / "data")],
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


def test_up_is_found_by_its_data_directory_and_refuses_a_second_one(up: Any, tmp_path: Path) -> None:
    _, url = up()
    data_dir = str(tmp_path / "data")
    listed = command("ls", "--json", TWINSTEP_DATA_DIR=data_dir)
    assert (listed.returncode, json.loads(listed.stdout)) == (0, {"jobs": []})
    other = command("up", "--port", "0", "--data-dir", data_dir)
    assert other.returncode == 2
    assert f"another control plane uses {data_dir}: {url}" in other.stderr
    taken = command("up", "--port", url.rsplit(":", 1)[1], "--data-dir", str(tmp_path / "second"))
    assert taken.returncode == 2
    assert "cannot be used" in taken.stderr
    assert "--port" in taken.stderr
    assert "Traceback" not in other.stderr + taken.stderr
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_up_quietly_and_leaves_no_address_behind(up: Any, tmp_path: Path, number: int) -> None:
    process, url = up()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert not (tmp_path / "data" / "server.json").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5)


def test_train_refuses_a_bad_spec_before_it_loads_anything(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: x\ntrain: {steps: -1}\n")
    done = command("train", str(path), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["faults"][0]["field"] == "train.steps"
    assert done.stderr == ""
