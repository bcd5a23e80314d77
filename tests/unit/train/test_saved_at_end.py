"""A run that ends by itself keeps its model wherever there is a place for it, unless its spec says no."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_resume_exactly import Run, spec_of

from twinstep.spec.errors import NotFoundError
from twinstep.spec.report import TIME_PARTS
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.inference.export import export
from twinstep.worker.train.environment import PLACE
from twinstep.worker.train.loop import Trainer
from twinstep.worker.train.progress import ProgressView


def steps_in(place: Path) -> list[int]:
    return [Reader(open_place(place), name).manifest.step for name in sorted(each.name for each in place.glob("0*"))]


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({}, [12]),
        ({"every_steps": 5}, [10, 12]),
        ({"every_steps": 4, "keep_last": 1}, [12]),
        ({"every_seconds": 3600.0}, [12]),
        ({"keep_best": 1, "keep_last": 1, "best_by": "auc"}, None),
        ({"at_end": False}, []),
        ({"at_end": False, "every_steps": 5}, [5, 10]),
        ({"at_end": False, "every_steps": 6}, [6, 12]),
    ],
)
def test_the_state_after_the_last_step_is_kept(tmp_path: Path, wanted: dict[str, Any], kept: list[int] | None) -> None:
    run = Run(spec_of(path=tmp_path, checkpoint=wanted))
    assert run.summary is not None
    if kept is None:
        assert steps_in(tmp_path)[-1] == 12
    else:
        assert steps_in(tmp_path) == kept
        assert len(run.notes.of("checkpoint_saved")) >= len(kept)


def test_it_is_kept_where_a_control_plane_says_and_holds_the_models_last_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "job-1"))
    run = Run(spec_of())
    newest = Reader(open_place(tmp_path / "job-1"), next(each.name for each in (tmp_path / "job-1").glob("0*")))
    saved = newest.tensors(dict.fromkeys(newest.manifest.tensors))
    for path, tensor in run.state.items():
        if path in saved:
            assert torch.equal(saved[path], tensor), path
    assert any(path in saved for path in run.state)
    made = export(str(tmp_path / "job-1"), str(tmp_path / "export"))
    assert made.step == 12


def test_a_run_that_had_ended_is_not_saved_again_and_one_stopped_before_is(tmp_path: Path) -> None:
    assert Run(spec_of(path=tmp_path), stop_at=7).summary is None
    assert steps_in(tmp_path) == [7]
    assert Run(spec_of(path=tmp_path)).summary is not None
    names = sorted(each.name for each in tmp_path.glob("0*"))
    assert steps_in(tmp_path) == [7, 12]
    assert Run(spec_of(path=tmp_path)).summary is not None
    assert sorted(each.name for each in tmp_path.glob("0*")) == names
    Run(spec_of(path=tmp_path, steps=14))
    assert steps_in(tmp_path) == [12, 14]


def test_writing_it_is_in_the_summarys_time_and_is_over_before_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    summary_of = Trainer._summary

    def summary(self: Trainer, scores: Any) -> Any:
        seen.append(steps_in(tmp_path))
        return summary_of(self, scores)

    monkeypatch.setattr(Trainer, "_summary", summary)
    run = Run(spec_of(path=tmp_path))
    assert seen == [[12]]
    assert run.summary is not None
    assert set(run.summary.time_s) == set(TIME_PARTS)
    assert run.summary.time_s["checkpoint"] > 0


def test_a_run_by_hand_without_a_place_says_that_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressView, "say", lambda self, text: said.append(text))
    Run(spec_of())
    assert "the model is not kept: checkpoint.path names no place for it" in said
    said.clear()
    Run(spec_of(path=tmp_path))
    assert not any("not kept" in each for each in said)


def test_an_export_of_a_run_without_one_says_why(tmp_path: Path) -> None:
    Run(spec_of(path=tmp_path, checkpoint={"at_end": False}))
    with pytest.raises(NotFoundError, match=r"unless checkpoint\.at_end is false"):
        export(str(tmp_path), str(tmp_path / "export"))
