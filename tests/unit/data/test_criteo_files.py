"""Criteo's click logs: what a row becomes, chunks, kept arrays, and what broken rows are answered with."""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.criteo import CATEGORIES, DEFAULT_ROWS, STALE_S, read_criteo
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.files import open_folder
from twinstep.worker.data.hashing import hash_ids
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MultiHotDataset


def line(label: int, dense: dict[int, int] | None = None, categories: dict[int, str] | None = None) -> str:
    """A row whose I{n} and C{n} are as given, and else 1 and 0000000f."""
    whole = [str((dense or {}).get(n, 1)) for n in range(1, 14)]
    hexes = [(categories or {}).get(n, "0000000f") for n in range(1, 27)]
    return "\t".join([str(label), *whole, *hexes])


EMPTY = "1" + "\t" * 39
LINES = [line(0, {2: -3}), line(1, {1: 7}, {1: "68fd1e64", 26: ""}), EMPTY, line(0, categories={1: "68FD1E64"})]


def spec_for(path: Path, **data: object) -> DataSpec:
    given = {"dataset": "criteo", "path": str(path), "split": {"eval_fraction": 0.5}, "batch_size": 2}
    return DataSpec.model_validate(given | data)


def load(path: Path, **data: object) -> MultiHotDataset:
    found = load_dataset(spec_for(path, **data))
    assert isinstance(found, MultiHotDataset)
    return found


def write(path: Path, lines: list[str] = LINES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{each}\n" for each in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path.parent


def test_a_row_becomes_logarithms_and_hashed_rows_of_tables(tmp_path: Path) -> None:
    data = load(write(tmp_path / "train.txt"), hash_rows={"C1": 1000, "C2": 1})
    rows = data.rows
    assert rows.labels.tolist() == [[0, 1, 1, 0]]
    np.testing.assert_allclose(rows.dense[:, 0], [math.log(2), math.log(8), 0, math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(rows.dense[:, 1], [0, math.log(2), 0, math.log(2)], rtol=1e-6)  # -3 counts as none
    first = 1 + hash_ids(np.array([0xF, 0x68FD1E64]), 999, table="C1")
    assert rows.values[0].tolist() == [first[0], first[1], 0, first[1]]
    assert rows.values[1].tolist() == [0, 0, 0, 0], "a table of one row has no other"
    assert rows.values[25][1] == 0
    assert {table.name: table.rows for table in data.schema.tables}["C3"] == DEFAULT_ROWS
    batch, stats = Loader(data, spec_for(tmp_path), seed=0).train_batch(0)
    assert batch.dense.shape == (2, 13)
    assert batch.ids.shape == (2, 26)
    assert stats.rows == 2


def test_files_are_read_in_order_plain_or_compressed_and_others_left_alone(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("not a row\n")
    write(tmp_path / "test.txt", ["\t" * 38])
    write(tmp_path / "day_0.gz", LINES[:1])
    write(tmp_path / "day_1", LINES[1:])
    assert load(tmp_path).rows.labels.tolist() == [[0, 1, 1, 0]]
    assert load(tmp_path / "day_1").rows.labels.tolist() == [[1, 1, 0]]
    with pytest.raises(DataError, match=r"train.txt or \*.tsv or day_\* is missing .*found: no files"):
        load(tmp_path / "empty" if not (tmp_path / "empty").mkdir() else tmp_path)
    with pytest.raises(DataError, match=r"data\.hash_rows names 'C27'"):
        load(tmp_path, hash_rows={"C27": 10})


def test_days_are_in_the_order_of_their_numbers_so_that_the_last_are_held_out(tmp_path: Path) -> None:
    for day in range(24):
        write(tmp_path / (f"day_{day}.gz" if day % 3 else f"day_{day}"), [line(day % 2, {1: day})])
    data = load(tmp_path)
    assert np.round(np.expm1(data.rows.dense[:, 0])).tolist() == list(range(24))
    assert data.train.max() == 11
    assert data.eval.min() == 12


BAD = [
    (line(2), "label '2', not a whole number in 0..1"),
    (line(1, categories={3: "xyz"}), "has C3 'xyz', not 8 hexadecimal digits"),
    (line(1, categories={3: "0000000g"}), "has C3 '0000000g'"),
    (line(1)[:-9], "has 39 fields, not 40"),
    (line(1).replace("\t", ","), "has 1 field, not 40"),
    (line(1, {4: 2**63}), f"has I4 '{2**63}', not a whole number in int64"),
    (line(1).replace("\t1\t", "\tnan\t", 1), "has I1 'nan'"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_a_bad_row_is_an_error_or_a_counted_skip(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path / "train.txt", [*LINES, text, *LINES])
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert error.value.problem.startswith("train.txt row 5 has ")
    assert says in error.value.problem
    for _ in range(2):  # the second reads the kept arrays, and says the same
        data = load(tmp_path, on_bad_row="skip", cache_dir=str(tmp_path / "kept"))
        assert (data.left_out.count, data.left_out.kept, len(data.rows)) == (1, 8, 8)
        assert says in data.left_out.summary()


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.txt holds no rows"):
        load(write(tmp_path / "train.txt", []))
    with pytest.raises(DataError, match=r"train.txt \(1 of 1 rows left out .*\) holds no rows"):
        load(write(tmp_path / "train.txt", ["x"]), on_bad_row="skip")
    with pytest.raises(DataError, match=r"a split of 1 rows"):
        load(write(tmp_path / "train.txt", LINES[:1]))


def test_arrays_are_kept_until_files_or_tables_change_and_never_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data/train.txt")
    kept = tmp_path / "kept"
    first = load(tmp_path / "data", cache_dir=str(kept))
    names = sorted(path.name for path in kept.iterdir())
    assert len(names) == 1
    monkeypatch.setattr("twinstep.worker.data.criteo.read_rows", None)  # nothing is read again
    again = load(tmp_path / "data", cache_dir=str(kept))
    assert again.rows.values[0].tolist() == first.rows.values[0].tolist()
    monkeypatch.undo()
    load(tmp_path / "data", cache_dir=str(kept), hash_rows={"C1": 7})
    write(tmp_path / "data/train.txt", [*LINES, "broken"])
    with pytest.raises(DataError, match="row 5"):
        load(tmp_path / "data", cache_dir=str(kept))
    assert len(list(kept.iterdir())) == 2, "nothing is left of a reading that failed"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept"):
        load(write(tmp_path / "data/train.txt").parent / "data", cache_dir=str(tmp_path / "file/below"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["rows.json", "label", "dense", "offset", "C1", "C26"])
@pytest.mark.parametrize("tear", [cut, lambda path: path.write_bytes(b""), Path.unlink])
def test_torn_arrays_are_made_anew(tmp_path: Path, name: str, tear: Callable[[Path], None]) -> None:
    write(tmp_path / "data/train.txt", [*LINES, "oh"])
    kept = tmp_path / "kept"
    options = {"cache_dir": str(kept), "on_bad_row": "skip"}
    whole = load(tmp_path / "data", **options)
    dense = np.array(whole.rows.dense)  # a copy: the file below the other one is about to be cut
    (home,) = kept.iterdir()
    tear(home / name)
    for _ in range(2):
        again = load(tmp_path / "data", **options)
        np.testing.assert_array_equal(again.rows.dense, dense)
        assert again.left_out == whole.left_out
        assert sorted(path.name for path in kept.iterdir()) == [home.name]


@pytest.mark.parametrize(
    "said", ["[]", "{}", '{"rows": "4", "bad": {}}', '{"rows": 4, "bad": {"count": 1, "x": 2}}', "\0"]
)
def test_what_is_said_of_kept_arrays_is_held_to_its_form(tmp_path: Path, said: str) -> None:
    write(tmp_path / "data/train.txt")
    load(tmp_path / "data", cache_dir=str(tmp_path / "kept"))
    (home,) = (tmp_path / "kept").iterdir()
    (home / "rows.json").write_text(said)
    assert len(load(tmp_path / "data", cache_dir=str(tmp_path / "kept")).rows) == 4


@pytest.mark.parametrize("torn", [False, True])
def test_runs_that_start_together_keep_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool) -> None:
    write(tmp_path / "data/train.txt")
    kept = tmp_path / "kept"
    if torn:
        load(tmp_path / "data", cache_dir=str(kept))
        cut(next(kept.iterdir()) / "C3")
    meet, rename = threading.Barrier(2, timeout=30), Path.rename

    def together(self: Path, target: Path) -> Path:
        if self.name == "arrays":
            meet.wait()  # both have seen that no whole copy is there
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", together)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(load, tmp_path / "data", cache_dir=str(kept)) for _ in range(2)]
        first, second = (each.result(timeout=60) for each in both)
    np.testing.assert_array_equal(first.rows.dense, second.rows.dense)
    assert len(list(kept.iterdir())) == 1, "nothing is left of the one that came second"


def test_what_a_killed_run_left_is_swept_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for name, age in ((".criteo-old", 2 * STALE_S), (".criteo-new", 0)):
        (kept / name / "arrays").mkdir(parents=True)
        (kept / name / "arrays/label").write_bytes(b"1234")
        for path in (kept / name / "arrays/label", kept / name / "arrays", kept / name):
            os.utime(path, (time.time() - age,) * 2)
    load(write(tmp_path / "data/train.txt"), cache_dir=str(kept))
    assert sorted(path.name[:11] for path in kept.iterdir()) == [".criteo-new", *[p.name[:11] for p in kept.glob("c*")]]


def test_arrays_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync, kept = os.fsync, tmp_path / "kept"

    def seen(handle: int) -> None:
        assert len(synced) >= 30 or not list(kept.glob("criteo-*"))
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr("os.fsync", seen)
    load(write(tmp_path / "data/train.txt"), cache_dir=str(kept))
    assert {*CATEGORIES, "label", "dense", "offset", "rows.json", "arrays", "kept"} == set(synced)


def test_a_home_folder_is_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    load(write(tmp_path / "data/train.txt"), cache_dir="~/kept")
    assert len(list((tmp_path / "kept").iterdir())) == 1
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where nobody has this number
    with pytest.raises(DataError, match="there is none here"):
        load(tmp_path / "data", cache_dir="~/kept")


HEX = st.text("0123456789abcdef", min_size=8, max_size=8) | st.just("")
ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(-5, 10**6), HEX) | st.none(), min_size=1, max_size=8)


@settings(deadline=None, max_examples=25)
@given(rows=ROWS, size=st.integers(50, 600))
def test_the_size_of_chunks_changes_nothing(
    rows: list[tuple[int, int, str] | None], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = ["oh" if row is None else line(row[0], {1: row[1]}, {1: row[2]}) for row in rows]
    folder = write(tmp_path_factory.mktemp("c") / "train.txt", [*lines, LINES[0]])
    spec = spec_for(folder, on_bad_row="skip")
    whole, parts = BadRows(policy="skip"), BadRows(policy="skip")
    first, _ = read_criteo(open_folder(str(folder)), spec, whole)
    second, _ = read_criteo(open_folder(str(folder)), spec, parts, chunk_bytes=size)
    assert whole == parts
    assert whole.count == rows.count(None)
    good = [row for row in rows if row is not None]
    assert first.labels[0, :-1].tolist() == [row[0] for row in good]
    for ours, theirs in zip((first.dense, *first.values), (second.dense, *second.values), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (first.values[0][:-1] == 0).tolist() == [row[2] == "" for row in good]


CHILD = """
import resource, sys
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.criteo import read_criteo
from twinstep.worker.data.files import open_folder
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(name):
    spec = DataSpec(dataset="criteo", path=f"{sys.argv[1]}/{name}", cache_dir=f"{sys.argv[1]}/kept")
    return read_criteo(open_folder(spec.path), spec, BadRows(), chunk_bytes=1 << 19)[0]
run("small")  # whatever is loaded or allocated once
before = peak()
rows = run("large")
print(peak() - before, len(rows), float(rows.labels[0, -1]))
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    row = line(1, dict.fromkeys(range(1, 14), 10**6)) + "\n"
    for name, count in (("small", 8_000), ("large", 150_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(row * count)
    assert (tmp_path / "large/train.txt").stat().st_size > 45e6
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    ).stdout.split()
    assert found[1:] == ["150000", "1.0"]
    assert float(found[0]) < 16, "MiB beyond what a file of a few chunks takes"


def test_there_is_a_feature_for_every_category() -> None:
    assert len(CATEGORIES) == 26
