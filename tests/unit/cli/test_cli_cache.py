"""The command cache: what a user sees of compiled programs on disk, as words and as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from twinstep.cli.app import run
from twinstep.worker.compile.store import ProgramStore

KEY = (
    "CompileKey(sizes=(('batch_size', 4),), devices=1, mesh=(), batch=(('item', (4,), 'int64'),), backend='xla', "
    "strategies=('fold_layers',), threads=2, versions=(('torch', '2.13'),))"
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    store = ProgramStore(tmp_path / "cache" / "programs")
    for key in (KEY, "another"):
        store.put(key, {"code": b"x" * 1000})
    old = time.time() - 10 * 86400
    os.utime(store._path("another"), (old, old))
    return tmp_path / "cache"


def said(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> str:
    assert run(["cache", *command]) == code
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> Any:
    return json.loads(said(capsys, *command, "--json", code=code))["cache"]


def test_ls_names_each_program_with_what_it_was_made_for(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "ls", "--dir", str(cache))
    for words in ("xla", "batch_size 4", "1 strategies", "10 d", "2 programs", str(cache)):
        assert words in out
    found = as_json(capsys, "ls", "--dir", str(cache))
    assert [entry["backend"] for entry in found["entries"] if "backend" in entry] == ["xla"]
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"]) > 2000
    assert found["besides"] == {}


def test_the_users_own_cache_is_the_one_where_none_is_named(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.rename(cache.parent / "twinstep")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert len(as_json(capsys, "ls")["entries"]) == 2


def test_verify_names_a_damaged_one_and_removes_it_when_asked(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 programs checked, 0 damaged" in said(capsys, "verify", "--dir", str(cache))
    path = ProgramStore(cache / "programs")._path(KEY)
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in said(capsys, "verify", "--dir", str(cache), code=1)
    found = as_json(capsys, "verify", "--dir", str(cache), "--remove")
    assert (found["checked"], len(found["damaged"]), found["removed"]) == (2, 1, 1)
    assert not path.exists()
    assert "1 program checked, 0 damaged" in said(capsys, "verify", "--dir", str(cache))


def test_prune_and_clear_remove_what_they_say(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "would remove 1 program" in said(capsys, "prune", "--dir", str(cache), "--older-than", "7d", "--dry-run")
    assert "removed 0 programs" in said(capsys, "prune", "--dir", str(cache), "--max-size", "1MiB")
    (gone,) = as_json(capsys, "prune", "--dir", str(cache), "--older-than", "36h")["removed"]["entries"]
    assert gone["age_s"] == pytest.approx(10 * 86400, abs=60)
    assert "removed 1 program" in said(capsys, "clear", "--dir", str(cache))
    assert "0 programs" in said(capsys, "ls", "--dir", str(cache))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["prune"], "give --max-size SIZE, --older-than AGE"),
        (["prune", "--max-size", "lots"], "--max-size 'lots' is not understood; allowed: 500MiB"),
        (["prune", "--older-than", "-3d"], "not understood"),
        (["prune", "--older-than", "9" * 40], "not understood"),
        (["prune", "--older-than", "3 fortnights"], "allowed: 30min, 12h, 7d"),
    ],
)
def test_amounts_that_are_none_are_refused_and_nothing_goes(
    command: list[str], words: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache", *command, "--dir", str(cache)]) == 2
    assert words in capsys.readouterr().err
    assert len(as_json(capsys, "ls", "--dir", str(cache))["entries"]) == 2


def test_a_cache_of_others_is_refused_in_words(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.chmod(0o777)
    assert run(["cache", "ls", "--dir", str(cache)]) == 2
    assert "can be written by others" in capsys.readouterr().err
