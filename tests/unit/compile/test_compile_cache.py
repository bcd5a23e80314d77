"""A warm start traces and compiles nothing, goes on bit for bit, and never takes a program made for another step."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile import CompileEvent, CompileWarning, StepCompiler, capture

BACKENDS = [pytest.param("inductor", marks=pytest.mark.inductor), "xla"]
Result = namedtuple("Result", "loss kept")
OFFSET = torch.tensor([0.5, -0.5, 0.25])
SCALE = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("a", torch.tensor([1.0, 2.0]))
        self.register_buffer("b", torch.tensor([3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x * OFFSET * SCALE + torch.tensor([1.0, 2.0, 3.0])))


def step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Any]:
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    before = model.a
    kept = model.a.clone()
    model.a.copy_(model.b)  # swapped: written after the graph
    model.b.copy_(before + kept)
    return {"result": Result(loss, kept), "name": "step", "none": None}


def make(backend: str, cache: Path | None, **options: Any) -> tuple[Model, Any, StepCompiler, list[CompileEvent]]:
    model, events = Model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    compiler = StepCompiler(
        step,
        model,
        optimizer,
        backend=backend,
        cache_dir=cache,
        on_event=events.append,
        **options,  # type: ignore[arg-type]
    )
    return model, optimizer, compiler, events


def train(made: tuple[Model, Any, StepCompiler, Any], steps: int = 4) -> tuple[list[Any], dict[str, Tensor], Any]:
    model, optimizer, compiler, _ = made
    torch.manual_seed(1)
    outputs = []
    for index in range(steps):
        found = compiler(torch.full((4, 3), 0.1 * (index + 1)))
        assert (found["name"], found["none"], type(found["result"])) == ("step", None, Result)
        outputs.append(tuple(found["result"]))
    compiler.pull()
    return outputs, model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_from_disk_goes_on_bit_for_bit_without_a_trace(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = make(backend, tmp_path / "cache")
    want = train(cold)
    text = str(cold[2].runner(torch.ones(4, 3)).captured.graph.graph)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a warm start traces nothing")

    traced = capture.capture
    monkeypatch.setattr(capture, "capture", refuse)
    warm = make(backend, tmp_path / "cache")
    got = train(warm)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [event.cache for event in (*cold[3], *warm[3])] == ["none", "disk"]
    (event,) = warm[3]
    assert event.capture_seconds == 0.0
    assert event.nodes == cold[3][0].nodes
    assert event.seconds < 0.5 * cold[3][0].seconds
    monkeypatch.setattr(capture, "capture", traced)
    assert str(warm[2].runner(torch.ones(4, 3)).captured.graph.graph) == text  # traced when it is asked for


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_the_step_closes_over_is_read_and_not_kept(backend: str, tmp_path: Path) -> None:
    losses = []
    before = OFFSET.clone()
    try:
        for factor in (1.0, 2.0):
            with torch.no_grad():
                OFFSET.mul_(factor)
            made = make(backend, tmp_path / "cache")
            made[0].eval()
            losses.append(float(made[2](torch.ones(4, 3))["result"].loss))
            with torch.no_grad():  # and in the process that has it
                OFFSET.add_(1)
            losses.append(float(made[2](torch.ones(4, 3))["result"].loss))
            with torch.no_grad():
                OFFSET.sub_(1)
            assert [event.cache for event in made[3]] == ["none" if factor == 1.0 else "disk"]
    finally:
        OFFSET.copy_(before)
    want = []
    for factor in (1.0, 2.0):
        model, optimizer = Model(), None
        model.eval()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        OFFSET.copy_(before * factor)
        want.append(float(step(model, optimizer, torch.ones(4, 3))["result"].loss.detach()))
        OFFSET.add_(1)
        want.append(float(step(model, optimizer, torch.ones(4, 3))["result"].loss.detach()))
        OFFSET.copy_(before)
    assert losses == pytest.approx(want, rel=1e-5)


def test_a_global_number_that_changes_compiles_again_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("xla", tmp_path / "cache")
    made[0].eval()
    first = float(made[2](torch.ones(4, 3))["result"].loss)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert float(made[2](torch.ones(4, 3))["result"].loss) > 2 * first
    assert [event.reason for event in made[3]] == ["first compile", "the train step's or the model's code changed"]


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_a_damaged_entry_is_compiled_anew_and_mended(damage: str, tmp_path: Path) -> None:
    want = train(make("xla", tmp_path / "cache"), steps=1)
    (entry,) = (tmp_path / "cache" / "programs").glob("*.program")
    content = entry.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    entry.write_bytes({"cut": content[:-7], "flip": flipped, "foreign": b"#!/bin/sh\nexit 1\n", "empty": b""}[damage])
    again = make("xla", tmp_path / "cache")
    torch.testing.assert_close(train(again, steps=1), want, rtol=0, atol=0)
    assert again[3][0].cache == "none"
    last = make("xla", tmp_path / "cache")
    train(last, steps=1)
    assert last[3][0].cache == "disk"


def test_an_entry_that_cannot_be_loaded_here_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(make("xla", tmp_path / "cache"), steps=1)
    from twinstep.worker.compile.lower.xla import XlaBackend

    def broken(*_: Any) -> Any:
        raise RuntimeError("made for another processor")

    with monkeypatch.context() as patched:
        patched.setattr(XlaBackend, "load", broken)
        made = make("xla", tmp_path / "cache")
        train(made, steps=1)
        assert made[3][0].cache == "none"
    made = make("xla", tmp_path / "cache")
    train(made, steps=1)
    assert made[3][0].cache == "disk"


def test_a_cache_that_cannot_be_trusted_is_said_once_and_not_used(tmp_path: Path) -> None:
    warnings: list[CompileWarning] = []
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    made = make("xla", tmp_path / "cache", on_warning=warnings.append)
    for rows in (1, 2):
        made[2](torch.ones(rows, 3))
    assert [warning.name for warning in warnings] == ["cache_unusable"]
    assert "others" in warnings[0].text


def test_a_step_that_returns_a_class_nobody_else_can_find_is_compiled_but_not_kept(tmp_path: Path) -> None:
    Local = namedtuple("Local", "loss")
    model = nn.Linear(3, 1)

    def local(model: Any, optimizer: Any, x: Tensor) -> Any:
        return Local(model(x).sum())

    for _ in range(2):
        events: list[CompileEvent] = []
        compiler = StepCompiler(
            local,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            backend="xla",
            cache_dir=tmp_path / "cache",
            on_event=events.append,
        )
        compiler(torch.ones(2, 3))
        assert events[0].cache != "disk"


def test_a_program_that_is_evicted_frees_its_memory(tmp_path: Path) -> None:
    made = make("xla", None, max_runners=1)
    first = made[2].runner(torch.ones(1, 3))
    gone = [weakref.ref(first), weakref.ref(first._program), weakref.ref(first._program.compiled)]  # type: ignore[attr-defined]
    del first
    made[2].runner(torch.ones(2, 3))
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import torch
    from torch import nn
    from twinstep.worker.compile import StepCompiler

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return {name: loss for name in {"loss", "again", "more"} if name in {"loss", "again"}}

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    events = []
    compiler = StepCompiler(
        step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), backend="xla",
        cache_dir=Path(sys.argv[1]), on_event=events.append,
    )
    found = compiler(torch.ones(4, 3))
    print(events[0].cache, events[0].key, float(found["loss"]))
    """
)


def test_processes_at_once_compile_a_key_once_and_all_run_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"},
        )
        for seed in range(2)
    ]
    found = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(each[0] for each in found) == ["disk", "none"]
    assert found[0][1:] == found[1][1:]  # the same key whatever the seed of hashes, and the same loss
