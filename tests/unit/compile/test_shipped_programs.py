"""A program that was compiled ahead is taken only where it is the very one; else the step is compiled, and says why."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twinstep.worker.compile import CompileEvent, CompileWarning, StepCompiler
from twinstep.worker.compile import store as store_module
from twinstep.worker.compile.kept import Made
from twinstep.worker.compile.key import CompileKey
from twinstep.worker.compile.shipped import ABOUT, FOLDER, Shipped, slice_key
from twinstep.worker.compile.store import ProgramStore

TARGET = "cpu:1"


def train_step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])
    loss.backward()
    optimizer.step()
    return {"loss": loss}


class Here:
    """A run on this machine's one device."""

    def __init__(self, directory: Path | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.events: list[CompileEvent] = []
        self.warnings: list[CompileWarning] = []
        self.compiler = StepCompiler(
            train_step,
            self.model,
            torch.optim.Adam(self.model.parameters(), lr=0.1),
            backend="xla",
            shipped=None if directory is None else Shipped(directory, TARGET),
            on_event=self.events.append,
            on_warning=self.warnings.append,
        )

    def train(self, steps: int = 3, size: int = 6) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            batch = {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, generator=generator)}
            losses.append(float(self.compiler(batch)["loss"]))
        self.compiler.pull()
        return losses + [float(each.detach().sum()) for each in self.model.parameters()]


def ship(directory: Path, *, size: int = 6, devices: Any = None, change: Any = lambda key: key,
         spoil: Any = lambda parts: parts) -> Path:  # fmt: skip
    """Compile the step for batches of a size, and keep it as preflight does."""
    here = Here()
    batch = {"x": torch.zeros(size, 4), "y": torch.zeros(size)}
    key: CompileKey = here.compiler.key(batch)
    lifted = here.compiler._need_lifted()
    made: Made = here.compiler._compile(batch, lifted)
    parts = lifted.backend.save(made.program)
    assert parts is not None
    there = lifted.backend.layout.devices() if devices is None else devices  # type: ignore[attr-defined]
    shipped = Shipped(directory, TARGET)
    wanted = change(slice_key(key, TARGET))
    path = shipped.put(wanted, made.kept, spoil(parts), devices=there, report={"said": 1})
    assert path is not None
    assert shipped.report(wanted) == {"said": 1}
    return path


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return Here().train()


def test_a_program_of_the_very_step_is_taken_and_gives_the_same_numbers(tmp_path: Path, expected: list[float]) -> None:
    ship(tmp_path)
    here = Here(tmp_path)
    assert here.train() == expected
    assert [each.cache for each in here.events] == ["ahead"]
    assert not here.warnings


def torn(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path: Path) -> None:
    path.chmod(0o666)


def gone(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    other = path.with_suffix(".elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("spoil", [torn, cut, foreign, linked])
def test_a_file_that_cannot_be_trusted_is_not(spoil: Any, tmp_path: Path, expected: list[float]) -> None:
    spoil(ship(tmp_path))
    here = Here(tmp_path)
    assert here.train() == expected
    assert [each.cache for each in here.events] == ["none"]
    (warning,) = here.warnings
    assert warning.name == "ahead_not_used"
    assert "torn, or not this user's own" in warning.text
    assert TARGET in warning.text


def other_version(key: CompileKey) -> CompileKey:
    return dataclasses.replace(
        key, versions=tuple((name, "0.0.1" if name == "libtpu" else version) for name, version in key.versions)
    )


V5P = type("Device", (), {"device_kind": "TPU v5", "id": 0, "coords": (0, 0, 0)})()
ELSEWHERE = {"change": lambda key: dataclasses.replace(key, backend="xla/v5p:2x2x1")}


@pytest.mark.parametrize(("more", "why"), [
    ({"size": 12}, r"differs: batch leaf .*\[12"),
    ({"change": other_version}, r"differs: libtpu 0\.0\.1 → "),
    (ELSEWHERE, "differs: backend xla/v5p:2x2x1 → xla/cpu"),
    ({"devices": [V5P] * 4}, "for 4 devices from TPU v5"),
    ({"spoil": lambda parts: {**parts, "executable": b"nothing"}}, "cannot load it"),
])  # fmt: skip
def test_a_program_for_something_else_is_left_and_the_reason_told(
    more: dict[str, Any], why: str, tmp_path: Path, expected: list[float]
) -> None:
    ship(tmp_path, **more)
    here = Here(tmp_path)
    assert here.train() == expected
    assert re.search(why, here.warnings[0].text), here.warnings[0].text
    assert [each.cache for each in here.events] == ["none"]


OF_OTHER_VERSIONS = {
    "a field more": lambda about: {**about, "key": {**about["key"], "later": 1}},
    "a field less": lambda about: {**about, "key": {k: v for k, v in about["key"].items() if k != "around"}},
    "versions as text": lambda about: {**about, "key": {**about["key"], "versions": "0.1"}},
    "no key": lambda about: {"devices": about["devices"]},
    "a key of another kind": lambda about: {**about, "key": "text"},
    "a list": lambda about: [],
}


@pytest.mark.parametrize("said", OF_OTHER_VERSIONS)
def test_an_entry_of_another_version_is_passed_over(said: str, tmp_path: Path) -> None:
    shipped, key = Shipped(tmp_path, TARGET), slice_key(Here().compiler.key({"x": torch.zeros(6, 4)}), TARGET)
    other = dataclasses.replace(key, devices=2)
    about = json.dumps(OF_OTHER_VERSIONS[said]({"key": dataclasses.asdict(other), "devices": []})).encode()
    shipped._store.put("of another version", {ABOUT: about})
    assert shipped._nearest(key) in ("", "the one that is stored differs: devices 2 → 1")
    shipped._store.put(other.text, {ABOUT: json.dumps({"key": dataclasses.asdict(other)}).encode()})
    assert shipped._nearest(key) == "the one that is stored differs: devices 2 → 1"


def test_what_an_entry_holds_beside_its_key_is_not_read_to_say_in_what_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = ProgramStore(tmp_path / FOLDER), 0
    store.put("a key", {"first": b"1" * (1 << 20), ABOUT: b"about", "last": b"2" * (1 << 20)})
    ((path, _, _),) = store.entries()
    whole = store_module._open

    class Counted:
        def __init__(self, file: Any) -> None:
            self.fileno, self.seek, self._file = file.fileno, file.seek, file

        def read(self, size: int) -> bytes:
            nonlocal read
            read += size
            return bytes(self._file.read(size))

    @contextlib.contextmanager
    def counting(path: Path) -> Iterator[Any]:
        with whole(path) as file:
            yield Counted(file)

    monkeypatch.setattr(store_module, "_open", counting)
    assert store.part(path, ABOUT) == b"about"
    assert store.part(path, "none") is None
    assert read < 2000


def test_where_nothing_is_kept_nothing_is_said(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.train(steps=1)
    assert not here.warnings
    assert not (tmp_path / FOLDER).exists()
