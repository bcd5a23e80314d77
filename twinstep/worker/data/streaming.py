"""The synthetic streaming set of the public DLRMv3: periods of requests, one line per user, from the files it writes.

Format: generative-recommenders, dlrm_v3/streaming_synthetic_data.py. `0.csv`, `1.csv`, … have a line per user and four
quoted lists per period: candidates, their ratings, history items, their ratings. All of a period's history are its
requests, and its candidates some of them; in periods made for inference it is the other way around. So a period's
events are the longer list, and its time is the period's number: a sample's history is then all earlier periods, as
there. Index files beside (`offset.csv`, `requests_per_ts.csv`, …) are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from twinstep.spec.errors import DataError
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.delimited import Chunk, Delimited, read_delimited
from twinstep.worker.data.events import (
    INT32_MAX,
    STARS,
    DataSchema,
    Events,
    FeatureSchema,
    Floats,
    Ints,
    TableSchema,
    TaskSchema,
    make_events,
)
from twinstep.worker.data.files import DataFile, Folder

LISTS = 4  # of a period: candidates, their ratings, history items, their ratings
LAYOUT = "0.csv, 1.csv, …: a line per user, four quoted lists per period (candidates, ratings, history, ratings)"
_FIELD = re.compile(rb'"[^"]*"|[^,\r\n]*')


@dataclass(frozen=True, slots=True)
class _User:
    """Events of one user, period after period."""

    item: Ints
    rating: Floats
    time: Ints


def read_streaming(folder: Folder, rows: Mapping[str, int], bad: BadRows) -> tuple[Events, DataSchema]:
    """Read all users. Users are numbered by line, over all files.

    Args:
        rows: of the tables, as the spec gives them. Items of a category are neighbours, and files do not say how many
            there are: where `item_id` and `item_category_id` are both given, a category has the quotient of items.

    Raises:
        DataError: a file is missing, or a row breaks its format; the message names file and row.
    """
    users: dict[int, _User] = {}
    first = 0
    for file in folder.files("[0-9]*.csv", layout=LAYOUT):
        last = 0
        for row, user in _users(file, bad):
            users[first + row - 1], last = user, row
        first += last
    if not users:
        raise DataError(f"{folder.called} holds no users", remedy=f"give {LAYOUT}")
    item = np.concatenate([user.item for user in users.values()])
    rating = np.concatenate([user.rating for user in users.values()])
    owner = np.repeat(np.fromiter(users, np.int64, len(users)), [len(user.item) for user in users.values()])
    items = max(rows.get("item_id", 0), int(item.max(initial=0)) + 1)
    features = {"item_id": np.arange(items)}
    if "item_category_id" in rows and "item_id" in rows:
        features["item_category_id"] = features["item_id"] // max(1, rows["item_id"] // rows["item_category_id"])
    events = make_events(
        user=owner,
        item=item,
        rating=rating,
        time=np.concatenate([user.time for user in users.values()]),
        # Whole stars, as the public data cuts them.
        actions=np.left_shift(np.int64(1), np.clip(rating.astype(np.int64), 1, STARS) - 1),
        user_features=np.arange(max(users) + 1)[:, None],
        item_features=np.stack(list(features.values()), axis=1),
        source=f"{folder.called} ({bad.summary()})" if bad.count else folder.called,
    )
    sizes = {"user_id": max(users) + 1} | {name: int(ids.max()) + 1 for name, ids in features.items()}
    schema = DataSchema(
        tables=tuple(TableSchema(name=name, rows=size) for name, size in sizes.items()),
        contextual=(FeatureSchema(name="user_id", table="user_id"),),
        item_features=tuple(FeatureSchema(name=name, table=name) for name in features),
        tasks=(TaskSchema(name="rating"),),
        action_bits=STARS,
    )
    return events, schema


def _users(file: DataFile, bad: BadRows) -> Iterator[tuple[int, _User]]:
    """Yield each good line of a file: its number from 1, and its user."""
    names = _names(file)
    if not names:
        return
    for chunk in read_delimited(file, Delimited(delimiter=",", quoted=True, columns=names), names):
        why: dict[int, str] = {}
        found = [_user(chunk, names, i, why) for i in range(len(chunk.rows))]
        chunk.reject(np.array([each is None for each in found], dtype=bool), why.__getitem__)
        for row in chunk.keep(bad, at=np.arange(len(found)))["at"].tolist():
            user = found[row]
            assert user is not None  # noqa: S101
            yield int(chunk.rows[row]), user


def _names(file: DataFile) -> tuple[str, ...]:
    """Return a name for each field of the file's lines, from its first line; none where there is no line.

    Raises:
        DataError: the line's fields are no periods of four lists.
    """
    with file.reading() as stream:
        line = b""
        while b"\n" not in line and (piece := stream.read(1 << 16)):
            line += piece
    line = line.partition(b"\n")[0]
    count = sum(1 for _ in _fields(line)) if line.strip() else 0
    if count % LISTS:
        raise DataError(
            f"{file.name} row 1 has {count} fields, not {LISTS} lists for each period", remedy=f"give {LAYOUT}"
        )
    return tuple(f"period {place // LISTS} list {place % LISTS}" for place in range(count))


def _fields(line: bytes) -> Iterator[bytes]:
    at = 0
    while True:
        found = _FIELD.match(line, at)
        assert found is not None, "an empty field matches too"  # noqa: S101
        yield found[0]
        at = found.end() + 1
        if at > len(line) or line[found.end() : at] != b",":
            return


def _user(chunk: Chunk, names: tuple[str, ...], i: int, why: dict[int, str]) -> _User | None:
    """Return the user of row `i`, or None, with what is wrong in `why`."""
    parts: list[tuple[Ints, Floats, int]] = []
    for period in range(len(names) // LISTS):
        lists = [chunk.raw(name)[i].as_py() for name in names[period * LISTS : (period + 1) * LISTS]]
        try:
            candidates, history = (_rated(*lists[at : at + 2]) for at in (0, 2))
        except ValueError as error:
            why[i] = f"has in period {period} {error}"
            return None
        item, rating = max((history, candidates), key=lambda each: len(each[0]))
        parts.append((item, rating, period))
    return _User(
        np.concatenate([item for item, _, _ in parts]),
        np.concatenate([rating for _, rating, _ in parts]),
        np.repeat([period for _, _, period in parts], [len(item) for item, _, _ in parts]),
    )


def _rated(items: bytes, ratings: bytes) -> tuple[Ints, Floats]:
    """Return a list of items and one of their ratings; a ValueError says what is wrong with them."""
    texts = [part.split(b",") if part.strip() else [] for part in (items, ratings)]
    if len(texts[0]) != len(texts[1]):
        raise ValueError(f"{len(texts[0])} items and {len(texts[1])} ratings")
    try:
        item, rating = np.array(texts[0], dtype=np.int64), np.array(texts[1], dtype=np.float32)
    except (ValueError, OverflowError):
        raise ValueError("what is no list of whole ids and of ratings") from None
    if len(item) and not 0 <= int(item.min()) <= int(item.max()) <= INT32_MAX - 1:
        raise ValueError(f"an id outside 0..{INT32_MAX - 1}")
    if len(rating) and not bool(((rating >= 0) & (rating <= STARS)).all()):
        raise ValueError(f"a rating outside 0..{STARS}")
    return item, rating
