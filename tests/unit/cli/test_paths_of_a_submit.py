"""A relative path of a spec means one place wherever the job runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.cli import jobs
from twinstep.platform.scheduler.service import Service
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.spec.paths import PATHS, check_paths, is_whole, relative_paths, with_whole_paths

DATA = {"dataset": "ml-1m", "path": "ml-1m"}


class Taking(BaseHTTPRequestHandler):
    """Takes every submit, and keeps what was given."""

    taken: list[dict[str, Any]] = []  # noqa: RUF012  set anew by the fixture

    def do_POST(self) -> None:
        type(self).taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer({"id": "job-1", "name": "a"}, 201)

    def _answer(self, body: Any, status: int) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Taking.taken = []
    server = HTTPServer(("127.0.0.1", 0), Taking)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def spec_file(folder: Path, **more: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(json.dumps({"name": "a", **more}))
    return path


def runs_here(monkeypatch: pytest.MonkeyPatch, folder: Path, written: dict[str, Any] | None) -> None:
    """Let the data directory's server.json say what is written; None: there is none."""
    (folder / "data").mkdir()
    monkeypatch.setenv("TWINSTEP_DATA_DIR", str(folder / "data"))
    if written is not None:
        (folder / "data" / "server.json").write_text(json.dumps(written))


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "written",
    [
        None,
        {},
        {"pid": 1},
        {"url": "http://127.0.0.1:9", "pid": 1},
        {"url": "http://127.0.0.1:x", "pid": 1},
        {"url": "http://[", "pid": 1},
        *({"url": "", "pid": pid} for pid in ("ended", "x", None, 0, -1, 10**30)),
    ],
)
def test_a_tunnel_to_another_machine_is_not_this_one(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any] | None
) -> None:
    """Its address is a loopback one, and the user's folders are not there."""
    monkeypatch.chdir(tmp_path)
    if written and written.get("url") == "":
        written = {"url": url, "pid": ended_pid() if written["pid"] == "ended" else written["pid"]}
    runs_here(monkeypatch, tmp_path, written)
    assert jobs.submit(str(spec_file(tmp_path, data=DATA)), url=url) == 0
    assert Taking.taken[-1]["data"]["path"] == "ml-1m", "which its control plane refuses"


def test_a_loopback_address_may_be_written_otherwise(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs_here(monkeypatch, tmp_path, {"url": url, "pid": os.getpid()})
    assert jobs.submit(str(spec_file(tmp_path, data=DATA)), url=url.replace("127.0.0.1", "localhost") + "/") == 0
    assert Taking.taken[-1]["data"]["path"] == str(tmp_path / "ml-1m")


def test_a_submit_makes_paths_whole_from_where_its_user_is(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs_here(monkeypatch, tmp_path, {"url": url, "pid": os.getpid()})
    spec = spec_file(tmp_path, data={**DATA, "path": "../ml-1m"}, checkpoint={"path": "kept"})
    assert jobs.submit(str(spec), url=url) == 0
    (taken,) = Taking.taken
    assert taken["data"]["path"] == str(tmp_path.parent / "ml-1m")
    assert taken["checkpoint"]["path"] == str(tmp_path / "kept")
    tpu = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}
    assert jobs.submit(str(spec_file(tmp_path, data=DATA, accelerator=tpu)), url=url) == 0
    assert Taking.taken[-1]["data"]["path"] == "ml-1m"  # not this machine's


@pytest.mark.parametrize(("part", "field"), PATHS)
def test_a_relative_path_is_refused_by_field_where_a_job_is_submitted(part: str, field: str) -> None:
    beside = {"data": {"dataset": "ml-1m"}, "model": {"kind": "module", "factory": "ranker:build"}}
    spec = validate_spec({"name": "a", part: {**beside.get(part, {}), field: "some/place"}})
    with pytest.raises(SpecError) as caught:
        check_paths(spec)
    (fault,) = caught.value.faults
    assert (fault.field, fault.remedy) == (f"{part}.{field}", f"{field}: /data/place")


def test_a_control_plane_refuses_a_relative_path(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    service = Service(Store(settings.database), settings)
    with pytest.raises(SpecError, match=r"data\.path"):
        service.check_runnable(validate_spec({"name": "a", "data": DATA}))
    service.check_runnable(validate_spec({"name": "a", "data": {**DATA, "path": "/data/ml-1m"}}))


@given(path=st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=40))
def test_whole_paths_stay_and_others_become_whole(path: str) -> None:
    spec = JobSpec.model_validate({"name": "a", "data": {**DATA, "path": path}})
    whole = with_whole_paths(spec, "/home/ada")
    assert relative_paths(whole) == {}
    if is_whole(path):
        assert whole == spec
    else:
        assert os.path.normpath(f"/home/ada/{path}") == whole.data.path
    check_paths(whole)
