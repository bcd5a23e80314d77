"""A control plane that others reach, as processes: refused, given its first token, started, logged in to, used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
AS_CHILD = Path(__file__).with_name("as_child.py")
COMMAND = [sys.executable, str(AS_CHILD), "-m", "twinstep"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TWINSTEP_")}
    return kept | {"TWINSTEP_DATA_DIR": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def twinstep(environ: dict[str, str]) -> Any:
    def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *args], input=stdin, env=environ, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def up(environ: dict[str, str]) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **more: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*COMMAND, "up", "--port", "0", "--host", "0.0.0.0", *args],  # noqa: S104
            env=environ | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_from_nothing_to_a_shared_control_plane(twinstep, up, tmp_path: Path) -> None:
    refused = twinstep("up", "--port", "0", "--host", "0.0.0.0")  # noqa: S104
    assert refused.returncode == 2
    assert "no admin's token to protect it" in refused.stderr
    assert not (tmp_path / "data").exists()
    made = twinstep("token", "create", "ada", "--admin", "--offline", "--json")
    secret = json.loads(made.stdout)["secret"]
    process, url = up("--public-url", "https://twinstep.example.com")
    assert url.startswith("http://127.0.0.1:")
    assert twinstep("ls").returncode == 2
    assert twinstep("login", stdin=f"{secret}\n").returncode == 0
    assert json.loads(twinstep("ls", "--json").stdout) == {"jobs": []}
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
        assert http.get("/healthz", headers={"host": "10.0.0.7:8765"}).status_code == 200
        assert http.get("/v1/jobs").status_code == 401
        page = http.get("/", headers={"host": "twinstep.example.com"})
        assert (page.status_code, page.headers["location"]) == (303, "/login?next=/")
        login = http.get("/login", headers={"host": "twinstep.example.com"})
        assert (login.status_code, "Log in" in login.text, secret in login.text) == (200, True, False)
        assert http.get("/", headers={"host": "evil.example"}).status_code == 403
        assert (
            http.get("/v1/jobs", headers={"host": "any.name", "authorization": f"Bearer {secret}"}).status_code == 200
        )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert secret not in out + err
    for path in (tmp_path / "data").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_clusters_secret_gives_the_first_token(twinstep, up, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(twinstep("token", "new").stdout)
    _, url = up(TWINSTEP_BOOTSTRAP_TOKEN_FILE=str(file))
    answer = httpx.get(f"{url}/v1/session", headers={"authorization": f"Bearer {file.read_text().strip()}"})
    assert (answer.json()["user"], answer.json()["administers"]) == ("bootstrap", True)
