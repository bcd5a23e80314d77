"""What `twinstep suspend` says: what was asked, not only how the run stood when it was asked."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.cli import attempts, client


class _Plane:
    """A control plane whose one job is in a state of the test's."""

    state = "running"

    def __init__(self, _url: str) -> None:
        pass

    def __enter__(self) -> _Plane:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def find(self, _ref: str) -> dict[str, Any]:
        return {"id": "job-1"}

    def post_once(self, _path: str, _body: Any) -> dict[str, Any]:
        return {"id": "job-1", "name": "a", "attempt": 1, "state": self.state, "reason": "waits for quota"}


@pytest.mark.parametrize(
    ("state", "said"),
    [("running", "is asked to give its nodes back; it is running now"), ("queued", "is queued: waits for quota")],
)
def test_suspend_says_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, said: str
) -> None:
    monkeypatch.setattr(client.PlaneClient, "of", _Plane)
    monkeypatch.setattr(_Plane, "state", state)
    assert attempts.suspend("a") == 0
    assert capsys.readouterr().out == f"a (job-1), attempt 1 {said}\n"
