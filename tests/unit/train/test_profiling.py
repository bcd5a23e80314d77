"""Traces of some steps: what they show, what is said of them, and what is not to be traced."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import SpecError, UnavailableError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import PROFILE_PARTS, RunSummary
from twinstep.worker.compile import traces
from twinstep.worker.compile.traces import Span, spans_of_xspace, start_trace
from twinstep.worker.data.prefetch import Prefetch
from twinstep.worker.train import profiling
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.profiling import breakdown, union
from twinstep.worker.train.progress import ProgressView
from twinstep.worker.train.stop import StopSignal

SMALL = {"embedding_dim": 4, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1}
DATA = {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2}


class Told:
    """A reporter that keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.steps: list[int] = []

    def metric(self, step: int, values: Mapping[str, float | None]) -> None:
        self.steps.append(step)

    def event(self, name: str, reason: str, data: Mapping[str, Any] | None = None) -> None:
        self.events.append((name, reason, dict(data or {})))

    def progress(self, *_: Any, **__: Any) -> None: ...

    def result(self, summary: RunSummary) -> None: ...

    def close(self) -> None: ...

    def of(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        return [(reason, data) for each, reason, data in self.events if each == name]


CACHE: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    CACHE["cache_dir"] = str(tmp_path_factory.mktemp("compiled"))


def spec_of(backend: str = "eager", **profile: Any) -> Any:
    return validate_spec(
        {
            "name": "t",
            "model": SMALL,
            "data": DATA,
            "compile": {"backend": backend, **CACHE},
            "train": {"steps": 6, "eval_batches": 1},
            "debug": {"profile": profile} if profile else {},
        }
    )


def trained(
    directory: Path | None,
    spec: Any,
    stop: StopSignal | None = None,
    on: Callable[[Trainer], None] | None = None,
    together: Together | None = None,
) -> Told:
    told = Told()
    view = ProgressView(None, 1)
    work = Trainer(spec, reporter=told, view=view, stop=stop or StopSignal(), run_dir=directory, together=together)
    if on is not None:
        on(work)
    try:
        work.train()
    finally:
        work.close()
    return told


@pytest.mark.parametrize(
    "backend", ["eager", "xla", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)
def test_some_steps_are_traced_and_their_time_is_told_part_by_part(tmp_path: Path, backend: str) -> None:
    told = trained(tmp_path, spec_of(backend, start=4, steps=2))
    ((reason, data),) = told.of("profiled")
    assert told.of("profile_failed") == []
    assert (data["first"], data["last"], data["directory"]) == (4, 5, str(tmp_path / "profile"))
    found = data["time_s"]
    assert set(found) == set(PROFILE_PARTS)
    assert found["compute"] > 0
    assert found["tensorcore"] == found["sparsecore"] == found["collectives"] == 0
    assert "steps 4 to 5" in reason
    assert str(tmp_path / "profile") in reason
    files = [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert data["bytes"] == sum(path.stat().st_size for path in files)
    if backend == "xla":  # what XProf reads: HOST.xplane.pb below plugins/profile/TIME
        (space,) = [path for path in files if path.name.endswith(".xplane.pb")]
        assert space.relative_to(tmp_path / "profile").parts[:2] == ("plugins", "profile")
        names = [plane.name for plane in jax.profiler.ProfileData.from_file(str(space)).planes]
        assert "/host:CPU" in names
    else:
        (trace,) = [path for path in files if path.name.endswith(".pt.trace.json.gz")]
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == traces.STEP and event.get("ph") == "X" for event in events) == 2


def test_a_batch_that_is_waited_for_is_host_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Prefetch.__next__
    monkeypatch.setattr(Prefetch, "__next__", lambda batches: (time.sleep(0.2), whole(batches))[1])
    for backend in ("eager", "xla"):
        ((_, data),) = trained(tmp_path / backend, spec_of(backend, start=5, steps=2)).of("profiled")
        assert data["time_s"]["host_input"] > 0.39, (backend, data)


def test_a_run_without_a_profile_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "start_trace", lambda *_: pytest.fail("nobody asked for it"))
    work: list[Trainer] = []
    told = trained(tmp_path, spec_of(), on=work.append)
    assert told.of("profiled") == []
    assert not (tmp_path / "profile").exists()
    assert work[0]._profiling.step(1) is work[0]._profiling.waiting() is work[0]._profiling.computing()


def test_a_run_that_is_stopped_meanwhile_has_traced_the_steps_until_then(tmp_path: Path) -> None:
    stop = StopSignal()

    def stops(work: Trainer) -> None:
        tell = work._tell

        def told(*args: Any, **more: Any) -> None:
            tell(*args, **more)
            stop.asked = work.step >= 4

        work._tell = told  # type: ignore[method-assign]

    told = trained(tmp_path, spec_of(start=3, steps=4), stop, stops)
    ((_, data),) = told.of("profiled")
    assert (data["first"], data["last"]) == (3, 4)


@pytest.mark.parametrize("backend", ["eager", "xla"])
def test_a_second_profiler_is_told_of_and_training_goes_on(tmp_path: Path, backend: str) -> None:
    other = start_trace(backend, tmp_path / "other")
    try:
        with pytest.raises(UnavailableError, match="profiler cannot be started") as error:
            start_trace(backend, tmp_path / "again")
        assert "debug.profile" in error.value.remedy
        told = trained(tmp_path / "run", spec_of(backend, start=2, steps=2))
    finally:
        other.stop()
    ((reason, _),) = told.of("profile_failed")
    assert "training goes on" in reason
    assert told.of("profiled") == []
    assert sorted(set(told.steps)) == [1, 2, 3, 4, 5, 6]
    start_trace(backend, tmp_path / "after").stop()  # and it can be started again


def test_a_place_that_cannot_be_written_is_told_of_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    told = trained(tmp_path, spec_of(start=2, steps=2))
    ((reason, _),) = told.of("profile_failed")
    assert "cannot be made" in reason
    assert told.steps[-1] == 6


class Second(Together):
    """Another process of a run of two, which nobody else is in."""

    own_rows = True

    def __init__(self) -> None:
        super().__init__(Process(rank=1, count=2))

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def of_first(self, value: Any) -> Any:
        return value


def test_only_the_first_process_traces_saves_graphs_and_counts_no_loader_processes_that_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of("xla", start=2, steps=2)
    spec = spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"loader_workers": 3}),
            "debug": spec.debug.model_copy(update={"save_graph": True}),
        }
    )
    seen: list[Trainer] = []
    told = trained(None, spec, on=seen.append, together=Second())
    assert list(tmp_path.iterdir()) == []
    for name in ("profiled", "profile_failed", "graph_saved"):
        assert told.of(name) == []
    ((reason, data),) = told.of("loader_workers_unused")
    assert "data.loader_workers: 3" in reason
    assert data["loader_workers"] == 0
    assert seen[0]._meter._packers == 1


def test_a_file_of_a_trace_that_goes_meanwhile_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: path.suffix == ".gz" or Path.exists(path))
    whole = Path.rglob

    def gone(path: Path, pattern: str) -> Any:
        return (*whole(path, pattern), path / "gone.gz")

    monkeypatch.setattr(Path, "rglob", gone)
    told = trained(tmp_path, spec_of(start=2, steps=2))
    ((reason, _),) = told.of("profile_failed")
    assert "training goes on" in reason
    assert told.steps[-1] == 6


@pytest.mark.parametrize("backend", ["eager", "xla"])
def test_a_disk_that_is_full_is_told_of_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The directory is taken away while steps are traced, and a file that is full stands in its place."""

    def full(work: Trainer) -> None:
        tell = work._tell

        def told(*args: Any, **more: Any) -> None:
            tell(*args, **more)
            if work.step == 2:
                (tmp_path / "profile").rmdir()
                (tmp_path / "profile").symlink_to("/dev/full")

        work._tell = told  # type: ignore[method-assign]

    told = trained(tmp_path, spec_of(backend, start=2, steps=2), on=full)
    ((reason, _),) = told.of("profile_failed")
    assert "training goes on" in reason
    assert told.steps[-1] == 6
    if backend == "xla":
        with pytest.MonkeyPatch.context():
            jax._src.profiler._profile_state.reset()  # JAX holds a trace that it could not write for one under way


@pytest.mark.parametrize(
    ("profile", "steps", "says"),
    [
        ({"start": 7, "steps": 1}, 6, "profile: {start: 6, steps: 1}"),
        ({"start": 5, "steps": 3}, 6, "profile: {start: 4, steps: 3}"),
        ({"start": 1, "steps": 10}, 6, "profile: {start: 1, steps: 6}"),
        ({"start": 0}, 20, "start: 1"),
        ({"steps": 0}, 20, "steps: 1"),
        ({"steps": 101}, 2000, "steps: 100"),
    ],
)
def test_steps_that_there_are_not_are_refused_with_the_nearest_that_there_are(
    profile: dict[str, int], steps: int, says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(**profile) if steps == 6 else validate_spec(
            {"name": "t", "train": {"steps": steps}, "debug": {"profile": profile}}
        )
    (fault,) = caught.value.faults
    assert fault.remedy == says, fault


# ---- what a trace shows ----


def plane(name: str, **lines: list[tuple[Any, ...]]) -> Any:
    def event(name: str, start: int, end: int, *stats: tuple[str, Any]) -> Any:
        return SimpleNamespace(name=name, start_ns=start, duration_ns=end - start, stats=stats)

    named = [
        SimpleNamespace(name=line.replace("_", " "), events=[event(*each) for each in events])
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=named)


def test_a_tpus_trace_is_told_apart_by_cores_collectives_and_input() -> None:
    """A step of 100 ns on two chips, by the names that libtpu gives planes and lines."""
    space = SimpleNamespace(
        planes=[
            plane("/host:CPU", python=[(traces.STEP, 0, 100), (traces.WAIT, 0, 20), ("else", 0, 90)]),
            plane(
                "/device:TPU:0",
                Steps=[("1", 0, 100)],
                XLA_Modules=[("jit_step", 20, 95)],
                XLA_Ops=[("%fusion.1", 20, 50), ("%all-reduce-done.3", 50, 60), ("copy.2", 60, 70)],
                Async_XLA_Ops=[("all-reduce-start.3", 40, 60), ("copy-start", 70, 90)],
            ),
            plane(
                "/device:TPU:0 SparseCore 0", Sparse_Core_Ops=[("gather", 45, 80)], Sparse_Core_Modules=[("m", 0, 99)]
            ),
            plane("/device:TPU:0 SparseCore 1", Sparse_Core_Ops=[("gather", 45, 75)]),
            plane("/device:TPU:1", XLA_Ops=[("fusion.1", 20, 70)]),
            plane("Task Environment"),
        ]
    )
    found = {part: round(seconds * 1e9) for part, seconds in breakdown(list(spans_of_xspace(space))).items()}
    # chip 0: TensorCore 20-50, 60-70; SparseCore beyond it 50-60, 70-80; collectives behind both; input 0-20; idle
    # 80-100. chip 1: TensorCore 20-70; input 0-20; idle 70-100.
    assert found == {
        "tensorcore": (40 + 50) / 2, "sparsecore": 20 / 2, "collectives": 0, "host_input": 20, "idle": (20 + 30) / 2,
        "compute": 0,
    }  # fmt: skip


def test_collectives_that_nothing_runs_beside_are_seen() -> None:
    space = SimpleNamespace(
        planes=[
            plane("/host:CPU", python=[(traces.STEP, 0, 100)]),
            plane("/device:TPU:0", XLA_Ops=[("fusion", 0, 40)], Async_XLA_Ops=[("all-to-all-start", 30, 70)]),
        ]
    )
    found = {part: round(seconds * 1e9) for part, seconds in breakdown(list(spans_of_xspace(space))).items()}
    assert (found["tensorcore"], found["collectives"], found["idle"]) == (40, 30, 30)


def test_on_a_gpu_kernels_compute_and_nccl_is_a_collective() -> None:
    def event(name: str, start: float, end: float, device: Any, index: int = 0) -> Any:
        return SimpleNamespace(
            name=name, device_type=device, device_index=index, time_range=SimpleNamespace(start=start, end=end)
        )

    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        event(traces.STEP, 0, 100, cpu),
        event(traces.WAIT, 0, 10, cpu),
        event(traces.COMPUTE, 10, 95, cpu),
        event("aten::mm", 10, 20, cpu),
        event("triton_red_fused", 20, 60, cuda),
        event("ncclDevKernel_AllReduce", 50, 80, cuda),
        event(traces.STEP, 0, 100, cuda),
    ]
    found = breakdown(list(traces.spans_of_torch(events, cuda=True)))
    shown = {part: round(seconds * 1e6) for part, seconds in found.items() if seconds}
    assert shown == {"compute": 40, "collectives": 20, "host_input": 10, "idle": 30}


spans = st.builds(
    lambda what, start, took, device: Span(what, start, start + took, device),
    st.sampled_from(["tensorcore", "sparsecore", "compute", "collectives", "host_input", "step"]),
    st.integers(0, 60).map(float),
    st.integers(1, 30).map(float),
    st.sampled_from([None, 0, 1]),
)


@given(st.lists(spans, max_size=25))
@settings(max_examples=200, deadline=None)
def test_parts_add_up_to_the_steps_and_are_those_of_a_count_by_moments(found: list[Span]) -> None:
    parts = breakdown(found)
    moments = [each + 0.5 for each in range(100)]
    traced = [at for at in moments if any(s.what == "step" and s.start < at < s.end for s in found)]
    assert math.isclose(sum(parts.values()), len(traced), abs_tol=1e-9)
    devices = sorted({s.device for s in found if s.device is not None}) or [None]
    counted = dict.fromkeys(PROFILE_PARTS, 0.0)
    for device in devices:
        for at in traced:
            doing = {s.what for s in found if s.start < at < s.end and s.device in (None, device)}
            counted[next((part for part in PROFILE_PARTS if part in doing), "idle")] += 1 / len(devices)
    assert all(math.isclose(parts[part], counted[part], abs_tol=1e-9) for part in PROFILE_PARTS)
    assert union([]) == []
