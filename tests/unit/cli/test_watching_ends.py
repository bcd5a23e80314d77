"""Ctrl-C at a command that watches a job ends the watching, and says that the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from twinstep.cli import follow, jobs


class Plane:
    """Knows one job."""

    url = "http://127.0.0.1:1"

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def find(self, ref: str) -> dict[str, Any]:
        return {"id": "job-1", "run_id": "run-1"}


def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
    yield "event", {"name": "started", "reason": "worker started"}
    raise KeyboardInterrupt


@pytest.mark.parametrize("watch", [
    lambda plane: follow.follow_job(plane, "job-1", as_json=False),
    lambda plane: follow.follow_job(plane, "job-1", as_json=True),
    lambda plane: jobs.logs("job-1", follow=True, of_slice=None, host=None, restart=None, attempt=None, url=None),
])  # fmt: skip
def test_ctrl_c_says_that_the_job_goes_on_and_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], watch: Callable[[Any], int]
) -> None:
    plane = Plane()
    monkeypatch.setattr(follow, "messages", interrupted)
    monkeypatch.setattr("twinstep.cli.client.PlaneClient.of", lambda _: plane)
    with pytest.raises(typer.Exit) as ended:
        watch(plane)
    assert ended.value.exit_code == 130
    said = capsys.readouterr().err
    assert "job-1 goes on; twinstep logs job-1 -f follows it, twinstep cancel job-1 ends it" in said
