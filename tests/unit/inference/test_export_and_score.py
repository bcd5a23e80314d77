"""Exports stand alone and score as the evaluation does; what is torn, foreign or of other data is said plainly."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from twinstep.cli.app import run
from twinstep.cli.inference import _place, _unwound_by_sigterm
from twinstep.spec.errors import ConflictError, NotFoundError, SpecError, UnavailableError
from twinstep.spec.parse import validate_spec
from twinstep.spec.report import RunSummary
from twinstep.worker.checkpoint.place import LocalPlace, UriPlace, open_place
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.inference import export as module_of_export
from twinstep.worker.inference.content import as_float, as_int8, model_of
from twinstep.worker.inference.export import export, open_export
from twinstep.worker.inference.score import _with, score
from twinstep.worker.train import run_spec

SPEC: dict[str, Any] = {
    "name": "t",
    "model": {
        "embedding_dim": 8, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8, "num_layers": 1,
    },
    "data": {
        "dataset": "synthetic", "synthetic_events": 3000, "batch_size": 16, "uih_len": 8, "num_candidates": 3,
        "eval_candidates": 2,
    },
    "compile": {"backend": "eager", "cache": False},
    "train": {"steps": 20},
}  # fmt: skip
CLICKS: dict[str, Any] = {
    "name": "c",
    "model": {"kind": "dlrm", "embedding_dim": 8, "bottom_dims": [8], "over_dims": [8], "cross_rank": 4},
    "data": {"dataset": "synthetic-clicks", "synthetic_events": 600, "batch_size": 16},
    "compile": {"backend": "eager", "cache": False},
    "train": {"steps": 10},
}


def trained(place: Path, spec: dict[str, Any]) -> tuple[RunSummary, str]:
    spec = {**spec, "checkpoint": {"path": str(place), "every_steps": 10, "keep_last": 3}}
    return run_spec(validate_spec(spec), quiet=True), str(place)


@pytest.fixture(scope="module")
def of_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSummary, str, Path]:
    home = tmp_path_factory.mktemp("export")
    summary, place = trained(home / "run", SPEC)
    export(place, str(home / "whole"))
    return summary, place, home / "whole"


def asked(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert run([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_scores_are_the_evaluations_in_every_format(
    ending: str, of_run: tuple[RunSummary, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, _, where = of_run
    out = tmp_path / f"scores.{ending}"
    told = asked(capsys, "score", str(where), "--out", str(out))["score"]
    assert told["candidates"] == summary.eval_examples
    assert told["scores"]["auc"] == summary.auc
    assert told["scores"]["ne"] == summary.ne
    if ending == "parquet":
        rows = pq.read_table(out).to_pylist()
    elif ending == "csv":
        rows = pc.read_csv(out).to_pylist()
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == summary.eval_examples
    dataset = load_dataset(validate_spec(SPEC).data)
    assert sorted(row["event"] for row in rows) == np.flatnonzero(dataset.held_out).tolist()
    for row in rows:
        event = row["event"]
        assert (row["user"], row["item"], row["time"]) == (
            dataset.events.user[event], dataset.events.item[event], dataset.events.time[event],
        )  # fmt: skip
        assert row["liked_label"] == dataset.labels[0, event]
    assert roc_auc_score([r["liked_label"] for r in rows], [r["liked_logit"] for r in rows]) == summary.auc
    logits = np.array([row["liked_logit"] for row in rows])
    np.testing.assert_allclose([row["liked"] for row in rows], 1 / (1 + np.exp(-logits)), rtol=1e-6)


def test_logits_are_those_of_the_model_bit_for_bit(of_run: tuple[RunSummary, str, Path], tmp_path: Path) -> None:
    _, _, where = of_run
    spec, schema, values, _ = open_export(str(where))
    model = model_of(spec, schema, values, where="here")
    expected = []
    with torch.no_grad():
        for batch, _ in Loader(load_dataset(spec.data), spec.data, seed=0).eval_batches():
            expected.append(model(batch).logits[0][batch.weights[0] > 0])
    assert run(["score", str(where), "--out", str(tmp_path / "a.parquet")]) == 0
    found = pq.read_table(tmp_path / "a.parquet")["liked_logit"].to_numpy()
    assert np.array_equal(found, torch.cat(expected).numpy())


def test_all_events_can_be_scored_and_rows_of_clicks(
    of_run: tuple[RunSummary, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.parquet"
    asked(capsys, "score", str(of_run[2]), "--out", str(out), "--part", "all")
    events = sorted(pq.read_table(out)["event"].to_pylist())
    assert events == list(range(len(load_dataset(validate_spec(SPEC).data).events)))
    summary, place = trained(tmp_path / "clicks", CLICKS)
    asked(capsys, "export", place, "--out", str(tmp_path / "served"))
    told = asked(capsys, "score", str(tmp_path / "served"), "--out", str(tmp_path / "clicks.csv"))["score"]
    assert told["scores"]["auc"] == summary.auc
    assert len(pc.read_csv(tmp_path / "clicks.csv")) == told["candidates"] == summary.eval_examples


@pytest.mark.parametrize("ranges", ["row", "table"])
def test_int8_is_smaller_says_what_it_costs_and_scores_so(
    ranges: str, of_run: tuple[RunSummary, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, place, _ = of_run
    where = str(tmp_path / "small")
    told = asked(capsys, "export", place, "--out", where, "--int8", ranges)["export"]
    assert told["scores"]["float32"]["auc"] == summary.auc
    after = asked(capsys, "score", where, "--out", str(tmp_path / "s.csv"))["score"]
    assert after["int8"] == ranges
    assert after["scores"]["auc"] == told["scores"]["int8"]["auc"]
    assert told["auc_loss"] == summary.auc - after["scores"]["auc"]
    assert abs(told["auc_loss"]) < 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.floats(-6, 6), st.sampled_from(["row", "table"]), st.integers(0, 99))
def test_int8_is_within_half_a_step_of_every_rows_range(
    rows: int, dim: int, scale: float, ranges: Any, seed: int
) -> None:
    spread = 10.0 ** (scale * torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)))
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) * spread
    values = {"parameter:t.weight": weight, "parameter:b": torch.ones(2)}
    held = as_int8(values, ["parameter:t.weight"], ranges)
    assert held["codes:t.weight"].dtype == torch.int8
    back = as_float(held)
    assert back.keys() == values.keys()
    own = weight if ranges == "table" else None
    low, high = (own.min(), own.max()) if own is not None else (weight.amin(1, True), weight.amax(1, True))
    error = (back["parameter:t.weight"].double() - weight.double()).abs()
    assert (error <= (high - low).double() / 510 * 1.0001 + weight.abs().max() * 1e-6).all()


def test_what_is_torn_foreign_or_in_the_way_is_said(
    of_run: tuple[RunSummary, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, place, where = of_run

    def fails(says: str, *argv: str) -> None:
        code = run(list(argv))
        err = capsys.readouterr().err
        assert code in (1, 2), err
        assert says in err
        assert "fix:" in err
        assert "Traceback" not in err

    out = str(tmp_path / "o.csv")
    fails("there is something at", "export", place, "--out", str(where))
    fails("there is no checkpoint of step 7", "export", place, "--out", str(tmp_path / "x"), "--step", "7")
    fails("there is no checkpoint at", "export", str(tmp_path), "--out", str(tmp_path / "x"))
    checkpoint = next(each for each in Path(place).iterdir() if "-step-10" in each.name)
    fails("is a checkpoint, not an export", "score", str(checkpoint), "--out", out)
    fails("holds a run's checkpoints, not an export", "score", str(checkpoint.parent), "--out", out)
    (tmp_path / "mine.csv").write_text("kept")
    fails("is there already", "score", str(where), "--out", str(tmp_path / "mine.csv"))
    assert (tmp_path / "mine.csv").read_text() == "kept"
    (tmp_path / "mine.csv").unlink()
    fails("there is no export", "score", str(tmp_path / "none"), "--out", out)
    fails("ends in none of .parquet", "score", str(where), "--out", str(tmp_path / "o.txt"))
    fails("no directory", "score", str(where), "--out", str(tmp_path / "no" / "o.csv"))
    assert list(tmp_path.iterdir()) == []
    run(["export", str(checkpoint), "--out", str(tmp_path / "torn")])
    data = next((tmp_path / "torn").glob("data-*"))
    whole = data.read_bytes()
    for torn in (whole[:-3], whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]):
        data.write_bytes(torn)
        fails("export the run again", "score", str(tmp_path / "torn"), "--out", out)
    (tmp_path / "torn" / "manifest.json").unlink()
    fails("never written to its end", "score", str(tmp_path / "torn"), "--out", out)
    assert not Path(out).exists()


def test_other_data_than_the_models_is_refused(
    of_run: tuple[RunSummary, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinstep.spec.errors import DataError
    from twinstep.worker.inference import score as module

    larger = validate_spec({**SPEC, "data": {**SPEC["data"], "rows": {"item_id": 5000}}})
    monkeypatch.setattr(module, "load_dataset", lambda spec: load_dataset(larger.data))
    with pytest.raises(DataError, match="table item_id"):
        module.score(str(of_run[2]), tmp_path / "o.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, OSError])
def test_an_export_that_is_ended_leaves_its_name_free(
    scheme: str, end: type[BaseException], of_run: tuple[RunSummary, str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, place, _ = of_run
    out = f"{scheme}{tmp_path}/mine"
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise end("ended")

        patch.setattr(UriPlace if scheme else LocalPlace, "commit", fails)
        with pytest.raises(UnavailableError if end is OSError else end):
            export(place, out)
    assert list(tmp_path.iterdir()) == []
    export(place, out)
    open_export(out)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_of_two_exports_to_one_name_the_quicker_stays(
    scheme: str, of_run: tuple[RunSummary, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, place, _ = of_run
    out = f"{scheme}{tmp_path}/mine"
    kind = UriPlace if scheme else LocalPlace
    commit: Any = kind.commit

    def second_first(*args: Any) -> None:
        monkeypatch.setattr(kind, "commit", commit)
        if scheme:
            commit(*args)  # as an upload whose answer was lost
            raise OSError("no answer")
        export(place, out)
        commit(*args)

    monkeypatch.setattr(kind, "commit", second_first)
    with pytest.raises(ConflictError, match="there is something at"):
        export(place, out)
    open_export(out)
    assert [each.name for each in tmp_path.iterdir()] == ([] if scheme else ["mine"])


@pytest.mark.parametrize("ends", ["commits", "fails", "commits later"])
def test_two_exports_to_one_uri_never_write_the_same_file(
    ends: str, of_run: tuple[RunSummary, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, place, _ = of_run
    out = f"memory://{tmp_path}/mine"
    write, commit = UriPlace.write, UriPlace.commit

    def other(self: UriPlace, name: str, file: str, parts: Any) -> None:
        """Another export to the same name goes all its way while this one has written its first file."""
        write(self, name, file, parts)
        monkeypatch.setattr(UriPlace, "write", write)
        if ends == "fails":
            monkeypatch.setattr(UriPlace, "commit", fails)
            with pytest.raises(UnavailableError):
                export(place, out)
            monkeypatch.setattr(UriPlace, "commit", commit)
        elif ends == "commits":
            export(place, out)

    def fails(*_: Any) -> None:
        raise OSError("no room")

    def late(self: UriPlace, name: str, file: str, content: bytes) -> None:
        """Both found the name free; the other commits at the same moment, and this one right after it."""
        monkeypatch.setattr(UriPlace, "commit", commit)
        export(place, out)
        commit(self, name, file, content)

    refuse: Any = module_of_export._refuse_taken
    monkeypatch.setattr(module_of_export, "_refuse_taken", lambda *_: None)  # the other has a directory there already
    monkeypatch.setattr(UriPlace, "write", other)
    if ends == "commits later":
        monkeypatch.setattr(UriPlace, "commit", late)
    if ends == "commits":
        with pytest.raises(ConflictError, match="there is something at"):
            export(place, out)
    else:
        export(place, out)
    monkeypatch.setattr(module_of_export, "_refuse_taken", refuse)
    _, _, values, manifest = open_export(out)  # whole, and of one of the two
    assert values
    assert len({file.split("-")[1] for file in manifest.files}) == 1
    store = open_place(f"memory://{tmp_path}")
    assert isinstance(store, UriPlace)
    left = {each.rsplit("/", 1)[-1] for each in store._fs.ls(f"{tmp_path}/mine", detail=False)}
    assert left >= {*manifest.files, "manifest.json"}
    if ends != "commits later":
        assert left == {*manifest.files, "manifest.json"}  # whoever lost took what it had written along


def test_sigterm_unwinds_what_is_half_written() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, _unwound_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


class _Plane:
    """Answers for one job, as a control plane does."""

    url = "http://far.example:8765"

    def __init__(self, url: str) -> None:
        pass

    def __enter__(self) -> _Plane:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def find(self, name: str) -> dict[str, Any]:
        return {"id": "job-7", "spec": {"checkpoint": {"path": "s3://bucket/runs" if name == "stored" else None}}}


def test_a_jobs_checkpoints_are_looked_for_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSTEP_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("twinstep.cli.client.PlaneClient.of", _Plane)
    assert _place("stored", _Plane.url) == "s3://bucket/runs/job-7"
    with pytest.raises(NotFoundError, match="no checkpoints of job-7 in") as told:
        _place("mine", _Plane.url)
    assert _Plane.url in told.value.remedy
    assert "DATA_DIR/checkpoints/job-7" in told.value.remedy
    (tmp_path / "checkpoints" / "job-7").mkdir(parents=True)
    assert _place("mine", _Plane.url) == str(tmp_path / "checkpoints" / "job-7")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--input", "/tmp"), "leave --input out; it is for models of ml-1m"),
        (("--batch-size", "70000"), "--batch-size"),
        (("--batch-size", "0"), "--batch-size"),
    ],
)
def test_data_and_sizes_that_a_spec_cannot_have_are_refused(
    given: tuple[str, str], says: str, of_run: tuple[RunSummary, str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(["score", str(of_run[2]), "--out", str(tmp_path / "o.csv"), *given]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "bug in twinstep" not in err
    assert list(tmp_path.iterdir()) == []


def test_whoever_calls_it_is_told_the_field_of_the_spec(of_run: tuple[RunSummary, str, Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError) as told:
        score(str(of_run[2]), tmp_path / "o.csv", batch_size=70000)
    assert [fault.field for fault in told.value.faults] == ["data.batch_size"]


def test_a_models_files_may_lie_elsewhere_by_now(tmp_path: Path) -> None:
    files = validate_spec({"name": "t", "data": {"dataset": "ml-1m", "path": "/data/ml-1m"}})
    assert _with(files, str(tmp_path), 7).data == files.data.model_copy(update={"path": str(tmp_path), "batch_size": 7})
    assert _with(files, None, None) == files


@pytest.mark.parametrize("trained_on", [
    {"accelerator": {"kind": "tpu", "generation": "v5p", "topology": "4x4x4"}},
    {"accelerator": {"kind": "tpu", "generation": "v5p", "topology": "4x4x4"}, "embedding": {"engine": "sparsecore"},
     "data": {"batch_size": 512}},
    {"accelerator": {"kind": "cpu", "devices": 3}, "compile": {"backend": "xla"}},
    {"accelerator": {"kind": "gpu", "model": "h100", "count": 8}, "embedding": {"engine": "torchrec"}},
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 100])
def test_batches_to_score_are_of_any_size_whatever_the_model_was_trained_on(
    trained_on: dict[str, Any], size: int
) -> None:
    spec = validate_spec({"name": "t", **trained_on})
    assert _with(spec, None, size) == spec.model_copy(
        update={"data": spec.data.model_copy(update={"batch_size": size})}
    )


def test_a_folder_of_code_is_for_a_users_own_module(of_run: tuple[RunSummary, str, Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs no code from"):
        score(str(of_run[2]), tmp_path / "scores.csv", source=tmp_path)
