"""MovieLens-100K: what is read, and what each broken file is answered with."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.events import DataSchema, Events
from twinstep.worker.data.files import open_folder
from twinstep.worker.data.movielens import find_ml_100k, read_ml_100k

FILES = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n10\t3\t4\t50\n2\t3\t1\t40\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\n10\t24\tM\twriter\n2\t81\tF\tnone\n",
    "ml-100k.item": (
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "3\tToy Story\t1995\tAnimation Comedy\n7\tUnknown\t\tDrama\n"
    ),
}


def folder_with(path: Path, **changed: str) -> Path:
    for name, text in FILES.items():
        (path / name).write_text(changed.get(name.partition(".")[2], text), encoding="utf-8")
    return path


def load_movielens(folder: Path) -> tuple[Events, DataSchema]:
    return read_ml_100k(open_folder(str(folder)), BadRows())


def test_the_installed_data_has_its_known_counts() -> None:
    dataset = load_dataset(DataSpec())
    assert len(dataset.events) == 100_000
    assert {t.name: t.rows for t in dataset.schema.tables}["item_id"] == 1682
    assert len(np.unique(dataset.events.user)) == 943
    assert 0.19 < dataset.held_out.mean() < 0.21
    assert (np.diff(dataset.events.time) >= 0).all()


def test_ids_are_numbered_from_zero_in_numeric_order(tmp_path: Path) -> None:
    events, schema = load_movielens(folder_with(tmp_path))
    assert events.user.tolist() == [0, 1]  # user 2 comes before user 10, and rated earlier
    assert events.item.tolist() == [0, 0]
    assert events.user_features[:, 0].tolist() == [7, 2]  # decades, 70 and over share one
    assert events.item_features[:, 1].tolist() == [14, 0]  # five-year buckets; an unknown year is 0
    assert [t.rows for t in schema.tables if t.name in ("gender", "item_id")] == [2, 2]


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("inter", "rating:float", "stars:float", "lacks the column 'rating:float'"),
        ("inter", "10\t3\t4\t50", "10\t3\t4", "row 2 has 3 fields, not 4"),
        ("inter", "2\t3\t1\t40", "2\t3\tgood\t40", "row 3 has rating 'good'"),
        ("inter", "2\t3\t1\t40", "2\t3\tnan\t40", "row 3 has rating 'nan'"),
        ("inter", "\t50", "\t1650000000000", "row 2 has timestamp '1650000000000'"),
        ("inter", "10\t3", "11\t3", "row 2 has the user_id '11', which ml-100k.user does not have"),
        ("user", "10\t24", "2\t24", "row 3 has the user_id 2 a second time"),
        ("user", "\t81", "\told", "row 3 has age 'old'"),
        ("item", "3\tToy", "³\tToy", "row 2 has item_id '³'"),
    ],
)
def test_a_broken_file_is_named_with_its_row(tmp_path: Path, name: str, old: str, new: str, says: str) -> None:
    text = FILES[f"ml-100k.{name}"]
    assert old in text
    folder = folder_with(tmp_path, **{name: text.replace(old, new, 1)})
    with pytest.raises(DataError, match="ml-100k") as error:
        load_movielens(folder)
    assert f"ml-100k.{name} " in error.value.problem
    assert says in error.value.problem
    assert error.value.remedy


def test_a_file_that_is_missing_empty_or_no_text_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "ml-100k.user").unlink()
    with pytest.raises(DataError, match=r"ml-100k\.user is missing"):
        load_movielens(folder)
    (folder / "ml-100k.user").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"ml-100k\.user cannot be read"):
        load_movielens(folder)
    (folder / "ml-100k.user").write_text("")
    with pytest.raises(DataError, match=r"ml-100k\.user lacks the column"):
        load_movielens(folder)
    folder_with(tmp_path, inter=FILES["ml-100k.inter"].splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"ml-100k\.inter holds no events"):
        load_movielens(folder)


def test_without_recbole_the_remedy_is_one_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(DataError, match="not installed") as error:
        find_ml_100k()
    assert error.value.remedy == "pip install --no-deps recbole==1.2.1"


def test_rows_of_a_table_can_be_raised_but_not_lowered_or_misnamed() -> None:
    assert {t.name: t.rows for t in load_dataset(DataSpec(rows={"item_id": 5000})).schema.tables}["item_id"] == 5000
    with pytest.raises(DataError, match="ids need 1682"):
        load_dataset(DataSpec(rows={"item_id": 100}))
    with pytest.raises(DataError, match="'film'") as error:
        load_dataset(DataSpec(rows={"film": 100}))
    assert "item_id" in error.value.remedy
