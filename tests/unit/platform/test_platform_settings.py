"""What a control plane is told at its start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinstep.platform.settings import Settings, default_data_dir, is_loopback
from twinstep.spec.errors import UnavailableError


def test_the_data_directory_is_the_one_given_else_the_users() -> None:
    assert default_data_dir({"TWINSTEP_DATA_DIR": "/somewhere"}) == Path("/somewhere")
    assert default_data_dir({"XDG_DATA_HOME": "/x"}) == Path("/x/twinstep")
    assert default_data_dir({}) == Path("~/.local/share/twinstep").expanduser()


def test_addresses_follow_from_the_settings(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path, host="::1", port=1).url == "http://[::1]:1"
    assert Settings(data_dir=tmp_path).url == "http://127.0.0.1:8765"
    assert Settings(data_dir=tmp_path).database == f"sqlite:///{tmp_path}/twinstep.db"


def test_a_data_directory_is_absolute_however_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    for given, meant in {"data": tmp_path / "data", "./a/b": tmp_path / "a/b", "~/x": Path("/home/someone/x")}.items():
        settings = Settings(data_dir=Path(given))
        assert (settings.data_dir, settings.runs_dir) == (meant, meant / "runs")
        assert settings.database == f"sqlite:///{meant}/twinstep.db"
        assert default_data_dir({"TWINSTEP_DATA_DIR": given}) == meant
        assert default_data_dir({"XDG_DATA_HOME": given}) == meant / "twinstep"
        assert replace(settings, port=0).data_dir == meant


def test_a_data_directory_that_leads_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="~no-such-user/x leads nowhere"):
        Settings(data_dir=Path("~no-such-user/x"))
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UnavailableError) as caught:
        default_data_dir({"TWINSTEP_DATA_DIR": "data"})
    assert "--data-dir" in caught.value.remedy


@pytest.mark.parametrize(
    "wrong", [{"port": -1}, {"port": 65536}, {"max_parallel_runs": -1}, {"host": "10.0.0.1", "no_login": True}]
)
def test_settings_that_cannot_work_are_refused_with_a_remedy(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(UnavailableError) as caught:
        Settings(data_dir=tmp_path, **wrong)
    assert caught.value.remedy


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_loopback_names_are_known(host: str) -> None:
    assert is_loopback(host)
