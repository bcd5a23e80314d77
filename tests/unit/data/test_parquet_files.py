"""Parquet by named columns: round trips, lazy row groups, and what broken files and rows are answered with."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.events import Events
from twinstep.worker.data.files import open_folder
from twinstep.worker.data.hashing import hash_ids, text_keys
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.parquet import read_parquet
from twinstep.worker.train.loop import Trainer

PLAIN: dict[str, list[Any]] = {
    "user_id": [7, -3, 7, 2**63 - 1],
    "item_id": [10, 20, 20, 30],
    "timestamp": [100, 90, 120, 130],
    "rating": [5.0, 3.5, 1.0, 4.0],
}
FIELDS = ("user", "item", "rating", "time", "actions", "watch", "user_features", "item_features")


def spec_for(path: Path | str, **data: object) -> DataSpec:
    given = {"dataset": "parquet", "path": str(path), "split": {"eval_fraction": 0.4}, "batch_size": 2, "uih_len": 4}
    return DataSpec.model_validate(given | data)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path.parent


def load(path: Path | str, **data: object) -> Dataset:
    found = load_dataset(spec_for(path, **data))
    assert isinstance(found, Dataset)
    return found


def test_a_table_becomes_events_with_ids_of_any_size_numbered(tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.parquet", PLAIN))
    events = data.events
    assert events.time.tolist() == [90, 100, 120, 130]
    assert events.user.tolist() == [0, 1, 1, 2]
    assert events.item.tolist() == [1, 0, 1, 2]
    assert events.rating.tolist() == [3.5, 5, 1, 4]
    assert [(table.name, table.rows) for table in data.schema.tables] == [("user_id", 3), ("item_id", 3)]
    assert data.labels.tolist() == [[0, 1, 0, 1]]
    batch, _ = Loader(data, spec_for(tmp_path), seed=0).train_batch(0)
    assert int(batch.cand_ids.max()) < 3


def test_columns_units_texts_and_actions_are_taken_as_the_spec_says(tmp_path: Path) -> None:
    table = {
        "who": ["ann", "bob", "ann"],
        "what": pa.array(["x", "y", "x"]).dictionary_encode(),
        "when": pa.array([datetime(2024, 1, day, tzinfo=UTC) for day in (1, 2, 3)], pa.timestamp("ms", tz="UTC")),
        "click": [True, False, True],
        "like": pa.array([0, 1, 1], pa.uint8()),
        "seconds": [1.5, 0.0, 9.0],
        "country": ["de", "fr", "it"],
        "maker": [5, 6, 7],
    }
    columns = {
        "user": "who", "item": "what", "time": "when", "rating": None, "actions": ["click", "like"],
        "watch": "seconds", "user_features": ["country"], "item_features": ["maker"],
    }  # fmt: skip
    data = load(write(tmp_path / "a.parquet", table), columns=columns, tasks=["like", "click", "watch_time"])
    assert [task.name for task in data.schema.tasks] == ["click", "like", "watch_time"]
    np.testing.assert_array_equal(data.labels, np.float32([[1, 0, 1], [0, 1, 1], [1.5, 0, 9]]))
    assert data.actions.tolist() == [1, 2, 3]
    assert data.schema.action_bits == 2
    assert data.events.time[0] == 1704067200
    ann, x = data.events.user[0], data.events.item[0]
    it, fr = text_keys(pa.array(["it", "fr"]))
    assert data.events.user_features[ann].tolist() == [int(it > fr)], "a user's features are those of its last row"
    assert data.events.item_features[x, 1] == 1, "so are an item's: makers are 6 and 7, and 5 is no more"
    milliseconds = PLAIN | {"timestamp": [each * 1000 for each in PLAIN["timestamp"]]}
    data = load(write(tmp_path / "ms/a.parquet", milliseconds), columns={"time_unit": "ms"})
    assert data.events.time.tolist() == [90, 100, 120, 130]


def test_features_that_vary_within_their_user_or_item_are_counted_and_reported(tmp_path: Path) -> None:
    table = PLAIN | {"country": ["de", "fr", "it", "fr"], "plan": [1, 2, 1, 3], "brand": [5, 6, 7, 8]}
    columns = {"user_features": ["user_id", "country", "plan"], "item_features": ["brand"]}
    data = load(write(tmp_path / "a.parquet", table, row_group_size=1), columns=columns)
    assert data.left_out.varying == {"country": 1, "brand": 1}, "user 7 has two countries, item 20 two brands"
    assert data.left_out.count == 0
    told: list[Any] = []
    loop = SimpleNamespace(
        _dataset=data,
        _view=SimpleNamespace(say=told.append),
        _reporter=SimpleNamespace(event=lambda *given: told.append(given)),
    )
    Trainer._report_left_out(cast(Trainer, loop))
    assert told[0] == told[1][1]
    assert "(brand: 1, country: 1)" in told[0]
    assert (told[1][0], told[1][2]) == ("features_vary", {"features": {"country": 1, "brand": 1}})
    told.clear()
    loop._dataset = load(tmp_path, columns={"user_features": ["plan"]})
    Trainer._report_left_out(cast(Trainer, loop))
    assert told == []


ROW = st.tuples(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 3), st.integers(0, 2**31 - 1), st.floats(0, 5, width=32)
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.lists(ROW, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_what_is_written_is_read_however_it_is_cut(
    rows: list[tuple[int, int, int, float]], group: int, batch: int, compressed: bool
) -> None:
    fs = fsspec.filesystem("memory")
    table = pa.table(dict(zip(PLAIN, (list(column) for column in zip(*rows, strict=True)), strict=True)))
    with fs.open("/parquet/one/a.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=group, compression="zstd" if compressed else "none")
    spec = spec_for("memory://parquet/one")
    whole, _ = read_parquet(open_folder("memory://parquet/one"), spec, BadRows())
    parts, _ = read_parquet(open_folder("memory://parquet/one"), spec, BadRows(), batch_rows=batch)
    assert same(whole, parts)
    users = np.unique([row[0] for row in rows])
    found = [(users[u], t, np.float32(r)) for u, t, r in zip(whole.user, whole.time, whole.rating, strict=True)]
    assert sorted(found) == sorted((row[0], row[2], np.float32(row[3])) for row in rows)


def same(a: Events, b: Events) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def test_a_folder_of_files_reads_as_one_file_from_any_file_system(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "whole/a.parquet", PLAIN))
    fs = fsspec.filesystem("memory")
    for part in range(4):
        rows = {name: values[part : part + 1] for name, values in PLAIN.items()}
        write(tmp_path / f"parts/day={part}/part-0.parquet", rows)
        with fs.open(f"/parquet/parts/p{part}.parquet", "wb") as file:
            pq.write_table(pa.table(rows), file)
    (tmp_path / "parts/_SUCCESS").write_text("")
    write(tmp_path / "parts/_metadata/x.parquet", PLAIN)
    assert same(whole.events, load(tmp_path / "parts").events)
    assert same(whole.events, load(f"file://{tmp_path}/parts").events)
    assert same(whole.events, load("memory://parquet/parts").events)
    assert same(whole.events, load(tmp_path / "whole/a.parquet").events)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"a Parquet file is missing from data.path.*found: no files"):
        load(tmp_path / "none")


def test_row_groups_are_read_one_by_one_and_other_columns_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = PLAIN | {"blob": ["x" * 100] * 4}
    folder = write(tmp_path / "a.parquet", wide, row_group_size=1)
    asked: list[tuple[Any, Any]] = []
    whole = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, size: int, *, row_groups: list[int], columns: list[str]) -> Any:
        asked.append((row_groups, columns))
        return whole(self, size, row_groups=row_groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    load(folder)
    assert [groups for groups, _ in asked] == [[0], [1], [2], [3]]
    assert {name for _, names in asked for name in names} == set(PLAIN)


def changed(name: str, row: int, value: Any, kind: pa.DataType | None = None) -> dict[str, Any]:
    values = [*PLAIN[name]]
    values[row] = value
    return PLAIN | {name: pa.array(values, kind)}


BAD = [
    (changed("rating", 2, math.nan), "row group 1, row 1 has the rating nan, not a finite number"),
    (changed("rating", 1, math.inf), "row group 0, row 2 has the rating inf"),
    (changed("rating", 3, None), "row group 1, row 2 has no rating"),
    (changed("user_id", 0, None), "row group 0, row 1 has no user_id"),
    (changed("item_id", 1, 2**63, pa.uint64()), f"row group 0, row 2 has item_id {2**63}, beyond int64"),
    (changed("timestamp", 2, 1704067200000), "row group 1, row 1 has the time 1704067200000 s, outside 1970 to 2038"),
    (changed("timestamp", 2, -5), "row group 1, row 1 has the time -5 s"),
]


@pytest.mark.parametrize(("table", "says"), BAD)
def test_a_bad_row_is_an_error_or_a_counted_skip(tmp_path: Path, table: dict[str, Any], says: str) -> None:
    folder = write(tmp_path / "a.parquet", table, row_group_size=2)
    with pytest.raises(DataError) as error:
        load(folder)
    assert error.value.problem.startswith(f"a.parquet {says}")
    data = load(folder, on_bad_row="skip")
    assert str(data.left_out.first[0]).startswith(f"a.parquet {says}")
    assert (data.left_out.count, data.left_out.kept, len(data.events)) == (1, 3, 3)


def test_rows_out_of_time_order_are_bad_where_the_spec_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "a.parquet", PLAIN, row_group_size=1)
    write(tmp_path / "b.parquet", changed("timestamp", 0, 140), row_group_size=4)
    assert len(load(folder).events) == 8
    with pytest.raises(DataError, match=r"a.parquet row group 1, row 1 has the time 90, before 100 of an earlier row"):
        load(folder, columns={"time_order": "rising"})
    for batch_rows in (1, 3, 100):
        bad = BadRows(policy="skip")
        events, _ = read_parquet(
            open_folder(str(folder)), spec_for(folder, columns={"time_order": "rising"}), bad, batch_rows=batch_rows
        )
        assert events.time.tolist() == [100, 120, 130, 140]
        assert bad.count == 4


@pytest.mark.parametrize(
    "bad", [{"timestamp": 1704067200000}, {"timestamp": 500, "rating": math.nan}, {"timestamp": 500, "user_id": None}]
)
@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_a_bad_row_says_nothing_of_the_order_of_time(tmp_path: Path, bad: dict[str, Any], batch_rows: int) -> None:
    rows = {"user_id": [1] * 6, "item_id": [2] * 6, "timestamp": [10, 20, 0, 30, 25, 40], "rating": [3.0] * 6}
    table = {name: [*values[:2], bad.get(name, values[2]), *values[3:]] for name, values in rows.items()}
    folder = write(tmp_path / "a.parquet", table, row_group_size=4)
    found = BadRows(policy="skip")
    spec = spec_for(folder, columns={"time_order": "rising"})
    events, _ = read_parquet(open_folder(str(folder)), spec, found, batch_rows=batch_rows)
    assert events.time.tolist() == [10, 20, 30, 40]
    assert found.count == 2
    assert str(found.first[1]) == "a.parquet row group 1, row 1 has the time 25, before 30 of an earlier row"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path, kind: pa.DataType) -> None:
    raw = pa.array([b"ann", b"\xff\xfe", b"bob", "\u00e9".encode()])
    size = np.int64 if kind == pa.large_string() else np.int32
    offsets = pa.py_buffer(np.frombuffer(raw.buffers()[1], np.int32)[:5].astype(size).tobytes())
    text = pa.large_string() if kind == pa.large_string() else pa.string()
    users = pa.Array.from_buffers(text, 4, [None, offsets, raw.buffers()[2]])
    folder = write(tmp_path / "a.parquet", PLAIN | {"user_id": users.cast(kind) if kind != text else users})
    with pytest.raises(DataError, match=r"a.parquet row group 0, row 2 has a user_id that is not UTF-8"):
        load(folder)
    data = load(folder, on_bad_row="skip")
    assert (data.left_out.count, len(data.events)) == (1, 3)
    keys = text_keys(pa.array(["ann", "bob", "\u00e9"]))
    assert data.events.user.tolist() == np.argsort(np.argsort(keys)).tolist()


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for part in (0, 1, 2, 9, 10, 11, 100):
        rows = {"user_id": [1], "item_id": [2], "timestamp": [1000 + part], "rating": [3.0]}
        write(tmp_path / f"hour={part}/part-{part}.parquet", rows)
    assert len(load(tmp_path, columns={"time_order": "rising"}).events) == 7


def test_files_that_are_cut_off_or_of_the_wrong_form_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", PLAIN, row_group_size=2) / "a.parquet"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-4], b"", b"PAR1", b"user_id,item_id\n1,2\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet \(row group 0\)"):
            load(tmp_path, on_bad_row="skip")
    path.write_bytes(whole[:8] + bytes(len(whole) // 3) + whole[8 + len(whole) // 3 :])  # the footer is whole
    with pytest.raises(DataError, match=r"a.parquet "):
        load(tmp_path)
    write(path, {name: values for name, values in PLAIN.items() if name != "rating"})
    with pytest.raises(DataError, match=r"a.parquet lacks the column 'rating'; it has user_id, item_id, timestamp"):
        load(tmp_path)
    write(path, PLAIN | {"timestamp": ["a", "b", "c", "d"]})
    with pytest.raises(DataError, match=r"a.parquet: the column 'timestamp' is string, not a whole number or a time"):
        load(tmp_path)
    write(path, PLAIN | {"user_id": [1.0, 2.0, 3.0, 4.0]})
    with pytest.raises(DataError, match=r"a.parquet: the column 'user_id' is double, not a whole number or text"):
        load(tmp_path)
    table = pa.table(PLAIN)
    pq.write_table(table.append_column("user_id", table.column("user_id")), path)
    with pytest.raises(DataError, match=r"a.parquet has 2 columns 'user_id'"):
        load(tmp_path, on_bad_row="skip")
    pq.write_table(table.append_column("note", table.column("user_id")).append_column("note", table.column(1)), path)
    assert len(load(tmp_path).events) == 4  # of columns that nobody asks for
    write(path, {name: values[:0] for name, values in PLAIN.items()} | {"rating": pa.array([], pa.float32())} | {
        name: pa.array([], pa.int64()) for name in ("user_id", "item_id", "timestamp")})  # fmt: skip
    with pytest.raises(DataError, match="holds no events"):
        load(tmp_path)
    write(path, {name: values[:1] for name, values in PLAIN.items()})
    with pytest.raises(DataError, match="leaves no events"):
        load(tmp_path)


def test_damage_anywhere_in_a_file_is_an_error_or_other_values_and_never_a_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", PLAIN) / "a.parquet"
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for place in [*range(4, footer, 40), *range(footer, len(whole), 9)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x97]) + whole[place + 1 :])
        try:
            load(tmp_path, on_bad_row="skip")
        except DataError as error:
            assert error.remedy  # noqa: PT017
            refused += place >= footer
    assert refused > 10
    name = whole.index(b"user_id", footer)  # where the names are no text at all
    path.write_bytes(whole.replace(b"user_id", b"user_\xff\xfe")[: len(whole)])
    assert name > footer
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        load(tmp_path)


def test_a_page_that_is_not_what_its_checksum_says_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", PLAIN, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = (path / "a.parquet").read_bytes()
    at = whole.index(np.float64(3.5).tobytes())
    (path / "a.parquet").write_bytes(whole[:at] + np.float64(2.5).tobytes() + whole[at + 8 :])
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        load(path, on_bad_row="skip")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", PLAIN, row_group_size=1) / "a.parquet"
    whole = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, *given: Any, **named: Any) -> Any:
        os.utime(path, (1, 1))
        return whole(self, *given, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    with pytest.raises(DataError, match=r"a.parquet changed while it was read"):
        load(tmp_path, on_bad_row="skip")


def test_hashed_tables_have_the_rows_asked_for_and_stay_as_the_data_grows(tmp_path: Path) -> None:
    small = load(write(tmp_path / "a.parquet", PLAIN), hash_rows={"item_id": 1000})
    rows = {table.name: table.rows for table in small.schema.tables}
    assert rows == {"user_id": 3, "item_id": 1000}
    expected = hash_ids(np.array([10, 20, 30]), 1000, table="item_id")
    assert small.events.item_features[:, 0].tolist() == expected.tolist()
    write(tmp_path / "b.parquet", changed("item_id", 0, 1))
    large = load(tmp_path, hash_rows={"item_id": 1000})
    assert large.events.item_features[1:, 0].tolist() == expected.tolist()


def test_a_vocabulary_numbers_alike_in_a_later_run(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = load(write(tmp_path / "one/a.parquet", PLAIN), vocabulary=str(kept))
    assert (kept / "item_id.txt").read_text() == "10\n20\n30\n"
    assert first.events.item_features[:, 0].tolist() == [1, 2, 3]
    write(tmp_path / "two/a.parquet", changed("item_id", 0, 5))
    second = load(tmp_path / "two", vocabulary=str(kept))
    assert second.events.item_features[:, 0].tolist() == [0, 2, 3], "5 is not listed"
    assert {table.name: table.rows for table in second.schema.tables}["item_id"] == 4
    with pytest.raises(DataError, match="the item_id 5 is not in the vocabulary"):
        load(tmp_path / "two", vocabulary=str(kept), unlisted="error")
