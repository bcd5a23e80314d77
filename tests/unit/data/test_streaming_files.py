"""The public streaming set: what its lines become, histories of earlier periods, and what is said of broken ones."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from twinstep.spec.errors import DataError
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.train import run_spec

ROWS = {"item_id": 40, "item_category_id": 4}


def write(folder: Path, *files: list[list[str]]) -> None:
    """Write files as the public generator does, with Python's own csv writer."""
    for number, lines in enumerate(files):
        with (folder / f"{number}.csv").open("w", newline="") as out:
            csv.writer(out).writerows(lines)
    (folder / "offset.csv").write_text('"0,99"\n')
    (folder / "ts_0_0.csv").write_text("0\n")


def loaded(folder: Path, **data: object) -> Dataset:
    spec = {"dataset": "streaming", "path": str(folder), "rows": ROWS, "label_threshold": 3.5, **data}
    dataset = load_dataset(validate_spec({"name": "s", "data": spec}).data)
    assert isinstance(dataset, Dataset)
    return dataset


LINES = [
    ["3", "4.5", "3,17", "4.5,2.0", "", "", "", "", "8", "3.5", "8", "3.5", "5,6", "1.0,3.49", "5", "1.0"],
    ["1", "5.0", "1", "5.0", "39", "2.9", "39,0", "2.9,4.0", "7", "1.0", "7", "1.0", "", "", "", ""],
]
OTHER = [["2", "3.0", "2", "3.0", "", "", "", "", "2", "4.0", "2", "4.0", "4", "2.0", "4", "2.0"]]


def test_lines_become_users_and_periods_times(tmp_path: Path) -> None:
    write(tmp_path, LINES, OTHER)
    dataset = loaded(tmp_path)
    events = dataset.events
    found = sorted(zip(*(column.tolist() for column in (events.user, events.time, events.item)), strict=True))
    assert found == [
        (0, 0, 3), (0, 0, 17), (0, 2, 8), (0, 3, 5), (0, 3, 6), (1, 0, 1), (1, 1, 0), (1, 1, 39), (1, 2, 7),
        (2, 0, 2), (2, 2, 2), (2, 3, 4),
    ]  # fmt: skip
    assert events.item_features[39].tolist() == [39, 3]
    assert {table.name: table.rows for table in dataset.schema.tables} == {"user_id": 3, **ROWS}
    order = np.lexsort((events.item, events.time, events.user))
    assert events.actions[order].tolist() == [8, 2, 4, 1, 4, 16, 8, 2, 1, 4, 8, 2]  # whole stars
    assert dataset.labels[0, order].tolist() == [1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    for samples in (dataset.train, dataset.eval):
        for start, end, first in zip(samples.history_start, samples.history_end, samples.cand_start, strict=True):
            entries = dataset.log.event[start:end]
            assert (events.time[entries] < events.time[dataset.log.event[first]]).all()


def test_without_the_number_of_categories_there_is_no_such_feature(tmp_path: Path) -> None:
    write(tmp_path, LINES)
    assert [each.name for each in loaded(tmp_path, rows={}).schema.item_features] == ["item_id"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["1", "5.0", "1", "5.0"], "row 2 has 4 fields, not 16"),
        (["1,2", "5.0", *LINES[1][2:]], "row 2 has in period 0 2 items and 1 ratings"),
        (["x", "5.0", *LINES[1][2:]], "row 2 has in period 0 what is no list"),
        (["1", "nan", *LINES[1][2:]], "row 2 has in period 0 a rating outside 0..5"),
        (["-1", "5.0", *LINES[1][2:]], "row 2 has in period 0 an id outside"),
        ([str(2**63), "5.0", *LINES[1][2:]], "row 2 has in period 0 what is no list"),
    ],
)
def test_a_line_that_breaks_the_format_is_named_or_left_out(tmp_path: Path, line: list[str], says: str) -> None:
    write(tmp_path, [LINES[0], line, LINES[1]])
    with pytest.raises(DataError, match=f"0.csv {says}"):
        loaded(tmp_path)
    kept = loaded(tmp_path, on_bad_row="skip")
    assert (kept.left_out.count, kept.left_out.kept) == (1, 2)
    assert set(kept.events.user.tolist()) == {0, 2}


@pytest.mark.parametrize("lines", [[], [["1", "2", "3"]]])
def test_files_without_periods_are_said(tmp_path: Path, lines: list[list[str]]) -> None:
    write(tmp_path, lines)
    with pytest.raises(DataError, match=r"holds no users|has 3 fields, not 4 lists"):
        loaded(tmp_path)


def test_the_preset_trains_on_it(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    lines = []
    for _ in range(20):
        line: list[str] = []
        for _ in range(4):
            items, stars = dice.integers(0, 40, 6).tolist(), dice.integers(1, 6, 6).tolist()
            line += [",".join(map(str, part)) for part in (items[:2], stars[:2], items, stars)]
        lines.append(line)
    write(tmp_path, lines)
    spec = {
        "name": "s",
        "model": {
            "preset": "streaming", "embedding_dim": 8, "transducer_dim": 8, "num_layers": 1, "linear_dim": 4,
            "attention_dim": 4, "hidden_dim": 8, "head_hidden_dim": 8,
        },
        "data": {
            "dataset": "streaming", "path": str(tmp_path), "rows": ROWS, "label_threshold": 3.5, "batch_size": 4,
            "uih_len": 12,
        },
        "compile": {"backend": "eager", "cache": False},
        "train": {"steps": 3},
    }  # fmt: skip
    summary = run_spec(validate_spec(spec), quiet=True)
    assert summary.eval_examples > 0
    assert summary.auc is not None
