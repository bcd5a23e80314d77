"""`twinstep up` as a process that is killed and started again, beside a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from clusterplane import API_URL, IMAGE, TPU
from fakekube.server import FakeServer

Wait = Callable[..., Any]


class Process:
    """`twinstep up`, on one data directory, started as often as it is killed."""

    def __init__(self, directory: Path, kubeconfig: Path, wait: Wait, more: Sequence[str] = ()) -> None:
        """`more` are further options of the command."""
        self._directory, self._kubeconfig, self._wait, self._more = directory, kubeconfig, wait, more
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()
        self.url = ""

    def start(self) -> None:
        (self._directory / "server.json").unlink(missing_ok=True)  # of one that was killed
        command = [sys.executable, "-m", "twinstep", "up", "--port", "0", "--data-dir", str(self._directory)]
        command += ["--kubeconfig", str(self._kubeconfig), "--image", IMAGE, "--workers-url", API_URL, *self._more]
        environ = {**os.environ, "TWINSTEP_DATA_DIR": str(self._directory)}
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def told() -> Any:
            with contextlib.suppress(OSError, ValueError):
                return json.loads((self._directory / "server.json").read_bytes())["url"]
            return None

        self.url = self._wait(told, seconds=60)
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self._process is not None
        self.http.close()
        self._process.send_signal(how)
        self._process.wait(timeout=30)

    def submit(self, name: str) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json={"name": name, "accelerator": TPU})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def state(self, job: dict[str, Any]) -> str:
        return str(self.http.get(f"/v1/jobs/{job['id']}").json()["state"])


@contextlib.contextmanager
def control_plane(directory: Path, server: FakeServer, wait: Wait, more: Sequence[str] = ()) -> Iterator[Process]:
    """A control plane in a process of its own, with further options of the command."""
    found = Process(directory, server.kubeconfig, wait, more)
    found.start()
    try:
        yield found
    finally:
        found.kill(signal.SIGTERM)
