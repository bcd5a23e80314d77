"""A checkpoint that a run does not wait for: it never counts, holds up no exit, and leaves its place to the next."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.worker.checkpoint import crew, manifest
from twinstep.worker.checkpoint.place import LocalPlace
from twinstep.worker.checkpoint.saver import Checkpoints

FILES = 40


def test_a_place_is_free_at_once_and_what_was_being_written_there_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, write, written = threading.Event(), threading.Event(), LocalPlace.write, []

    def slow(self: LocalPlace, name: str, file: str, parts: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        written.append(file)
        write(self, name, file, parts)

    monkeypatch.setattr(LocalPlace, "write", slow)
    monkeypatch.setattr(manifest, "FILE_BYTES", 1024)
    monkeypatch.setattr(crew, "GIVE_UP_S", 0.01)
    tensors = {f"model:{number}": torch.zeros(256) for number in range(FILES)}
    first = Checkpoints(tmp_path)
    first.save(tensors, step=3, about={})
    assert begun.wait(60)
    first.give_up()
    second = Checkpoints(tmp_path)
    go_on.set()
    assert first.finish(60)
    assert len(written) <= 2, "the files at hand, and no others"
    assert [note.name for note in first.notes()] == ["checkpoint_failed"]
    assert second.place.names() == []
    second.save(tensors, step=3, about={})
    second.close()
    assert [note.name for note in second.notes()] == ["checkpoint_saved"]


CHILD = f"""
import sys, time, torch
from twinstep.worker.checkpoint import manifest
from twinstep.worker.checkpoint.place import LocalPlace
from twinstep.worker.checkpoint.saver import Checkpoints
write = LocalPlace.write
def slow(self, *more):
    time.sleep(0.05)
    write(self, *more)
LocalPlace.write = slow
manifest.FILE_BYTES = 1024
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save({{f"model:{{number}}": torch.zeros(256) for number in range({FILES})}}, step=3, about={{}})
try:
    raise KeyboardInterrupt
finally:
    checkpoints.give_up()
"""


def test_an_interpreter_that_ends_writes_no_checkpoint_to_its_end_first(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path], capture_output=True, timeout=200, check=False)
    assert done.stderr.endswith(b"KeyboardInterrupt\n")
    assert len(list(tmp_path.glob(".draft-*/*"))) < FILES / 2
    assert Checkpoints(tmp_path).place.names() == []
