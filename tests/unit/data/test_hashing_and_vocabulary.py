"""Hashing of ids never changes and spreads; vocabularies are whole, and faults in them are named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.worker.data.hashing import GOLDEN, hash_ids, table_seed, text_keys
from twinstep.worker.data.vocabulary import Vocabulary, load_vocabulary, read_vocabulary, write_vocabulary

FIXED = {
    "item_id": [481296, 124766, 595172, 562017, 216406, 691740, 45373],
    "user_id": [209689, 141423, 422012, 883583, 109583, 162439, 411570],
    "text": [-5426141060434712860, 3405396810240292928, 3394012004367669963, -2294098665169095407],
}
INT64 = st.integers(-(2**63), 2**63 - 1)


def mix(value: int) -> int:
    """SplitMix64's finalizer in Python's own numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_the_mix_is_splitmix64_whose_published_numbers_it_gives() -> None:
    # The generator with seed 1234567 (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64): state += GOLDEN, mixed.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix((1234567 + step * GOLDEN) % 2**64) for step in range(1, 5)] == published


@given(st.lists(INT64, min_size=1, max_size=20), st.integers(1, 2**31 - 1), st.text(max_size=8))
def test_the_vectorised_mix_is_the_scalar_one(ids: list[int], rows: int, table: str) -> None:
    found = hash_ids(np.array(ids, dtype=np.int64), rows, table=table)
    assert found.tolist() == [mix((each + table_seed(table) * GOLDEN) % 2**64) % rows for each in ids]


def test_rows_of_ids_are_fixed_for_ever() -> None:
    """A table that was trained with other numbers could not be read any more: never change these."""
    ids = np.array([0, 1, 2, -1, 2**63 - 1, -(2**63), 4_369_953])
    assert hash_ids(ids, 1_000_003, table="item_id").tolist() == FIXED["item_id"]
    assert hash_ids(ids, 1_000_003, table="user_id").tolist() == FIXED["user_id"]
    assert text_keys(pa.array(["", "a", "é", "68fd1e64"])).tolist() == FIXED["text"]


def test_neighbouring_ids_spread_evenly_over_rows_and_differently_over_tables() -> None:
    rows = 512
    counts = {name: np.bincount(hash_ids(np.arange(rows * 200), rows, table=name), minlength=rows) for name in "ab"}
    for found in counts.values():
        chi = float(((found - 200) ** 2 / 200).sum())
        assert chi < 660, "beyond 5 standard deviations of 511 degrees of freedom"
    assert (hash_ids(np.arange(1000), rows, table="a") != hash_ids(np.arange(1000), rows, table="b")).mean() > 0.9


@given(st.lists(st.text(max_size=4)))
def test_a_text_has_one_key_whatever_stands_around_it(texts: list[str]) -> None:
    keys = text_keys(pa.array(texts, pa.string()))
    assert keys.tolist() == [int(text_keys(pa.array([text]))[0]) for text in texts]
    assert len(set(keys.tolist())) == len(set(texts))


@given(ids=st.lists(INT64, unique=True, max_size=20), asked=st.lists(INT64, max_size=10))
def test_a_vocabulary_that_is_written_is_read(
    ids: list[int], asked: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("v") / "item.txt"
    write_vocabulary(path, np.array(ids, dtype=np.int64))
    found = read_vocabulary(path)
    assert found.ids.tolist() == ids
    assert found.rows == len(ids) + 1
    rows, known = found.find(np.array([*asked, *ids], dtype=np.int64))
    assert rows.tolist() == [ids.index(each) + 1 if each in ids else 0 for each in [*asked, *ids]]
    assert known.tolist() == [each in ids for each in [*asked, *ids]]


@pytest.mark.parametrize(
    ("text", "says"),
    [("1\nx\n", "row 2 is no whole number"), (f"{2**63}\n", "row 1 is no whole number"), ("1\n\n2\n", "row 2 is no"),
     ("4\n5\n4\n", "row 3 has the id 4 a second time")],
)  # fmt: skip
def test_a_broken_vocabulary_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "item.txt").write_text(text)
    with pytest.raises(DataError, match=f"item.txt {says}"):
        load_vocabulary(tmp_path, "item", np.array([1]))


def test_a_vocabulary_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vocabulary(tmp_path / "item.txt", np.array([1, 2]))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_vocabulary(tmp_path / "item.txt", np.array([3]))
    assert (tmp_path / "item.txt").read_text() == "1\n2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["item.txt"]
    with pytest.raises(DataError, match="cannot be kept: No space left on device"):
        load_vocabulary(tmp_path, "other", np.array([3]))


def test_an_empty_vocabulary_lists_nothing() -> None:
    rows, known = Vocabulary(np.zeros(0, np.int64)).find(np.array([1, 2]))
    assert (rows.tolist(), known.tolist()) == ([0, 0], [False, False])
