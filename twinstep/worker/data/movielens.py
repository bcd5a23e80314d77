"""MovieLens-100K, from the files that the installed recbole distribution carries; recbole itself is never imported.

The files are tab-separated with a typed header (`user_id:token`). Every row is checked; a fault names file and row.
`datasets.py` calls `load_movielens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError
from twinstep.worker.data.events import (
    INT32_MAX,
    DataSchema,
    Events,
    FeatureSchema,
    Ints,
    TableSchema,
    TaskSchema,
    make_events,
)

DISTRIBUTION = "recbole"
FOLDER = "recbole/dataset_example/ml-100k"
STARS = 5
AGE_DECADES = 8  # under 10, 10-19, ... 70 and over
YEAR_BUCKETS = 16  # 0: unknown or before 1930, then five-year steps to 1999
FIRST_YEAR = 1930
YEARS_PER_BUCKET = 5


def find_movielens() -> Path:
    """Return the directory of the ml-100k files.

    Raises:
        DataError: recbole is not installed, or its distribution lacks the files.
    """
    try:
        root = Path(str(metadata.distribution(DISTRIBUTION).locate_file("")))
    except metadata.PackageNotFoundError:
        raise DataError(
            "the dataset ml-100k comes with the distribution recbole, which is not installed",
            remedy="pip install --no-deps recbole==1.2.1",
        ) from None
    folder = root / FOLDER
    if not (folder / "ml-100k.inter").is_file():
        raise DataError(
            "the installed recbole distribution does not hold the ml-100k files",
            remedy="pip install --no-deps --force-reinstall recbole==1.2.1",
        )
    return folder


def load_movielens(folder: Path) -> tuple[Events, DataSchema]:
    """Read ratings, users and films from `folder`; ids are numbered from 0 in numeric order.

    The user's own id is no feature: most users of the newest ratings have none before them, so that their rows would
    be untrained; a history tells who they are. Validated on training time alone, leaving it out gave 0.005 of AUC on
    average of three seeds, from -0.001 to 0.014: little, but it costs nothing.

    Raises:
        DataError: a file or column is missing, or a row breaks its format; the message names file and row.
    """
    users = _Table(folder / "ml-100k.user", ("user_id:token", "age:token", "gender:token", "occupation:token"))
    films = _Table(folder / "ml-100k.item", ("item_id:token", "release_year:token", "class:token_seq"))
    ratings = _Table(folder / "ml-100k.inter", ("user_id:token", "item_id:token", "rating:float", "timestamp:float"))
    user_index, item_index = users.index("user_id:token"), films.index("item_id:token")
    occupations = _numbered(users.column("occupation:token"))
    genders = _numbered(users.column("gender:token"))
    genres = _numbered([text.split(" ", 1)[0] for text in films.column("class:token_seq")])  # a film's first genre
    decades = np.minimum(users.integers("age:token", low=0, high=150) // 10, AGE_DECADES - 1)
    years = np.array([_year_bucket(text) for text in films.column("release_year:token")], dtype=np.int64)
    item_ids = films.lookup("item_id:token", item_index, films.name)
    user_ids = users.lookup("user_id:token", user_index, users.name)
    user_features = np.stack((decades, genders.ids, occupations.ids), axis=1)
    item_features = np.stack((item_ids, years, genres.ids), axis=1)
    events = make_events(
        user=ratings.lookup("user_id:token", user_index, "ml-100k.user"),
        item=ratings.lookup("item_id:token", item_index, "ml-100k.item"),
        rating=ratings.floats("rating:float", low=1, high=STARS).astype(np.float32),
        time=ratings.floats("timestamp:float", low=0, high=INT32_MAX).astype(np.int64),
        user_features=user_features[np.argsort(user_ids)],
        item_features=item_features[np.argsort(item_ids)],
        source="ml-100k.inter",
    )
    rows = {
        "age": AGE_DECADES,
        "gender": genders.size,
        "occupation": occupations.size,
        "item_id": len(item_index),
        "release_year": YEAR_BUCKETS,
        "genre": genres.size,
    }
    schema = DataSchema(
        tables=tuple(TableSchema(name=name, rows=count) for name, count in rows.items()),
        contextual=tuple(FeatureSchema(name=n, table=n) for n in ("age", "gender", "occupation")),
        item_features=tuple(FeatureSchema(name=n, table=n) for n in ("item_id", "release_year", "genre")),
        tasks=(TaskSchema(name="liked"),),
        action_bits=STARS,
    )
    return events, schema


class _Table:
    """Columns of one typed, tab-separated file, as text; row numbers count the header as row 1."""

    def __init__(self, path: Path, wanted: Sequence[str]) -> None:
        self.name = path.name
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"{path.name} is missing", remedy=f"put it into {path.parent}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path.name} cannot be read: {error}", remedy="reinstall the dataset") from None
        header, *body = text.rstrip("\n").split("\n")
        fields = header.split("\t")
        missing = [column for column in wanted if column not in fields]
        if missing:
            raise DataError(
                f"{path.name} lacks the column {missing[0]!r}; its header has {', '.join(fields)[:200]}",
                remedy="reinstall the dataset; its header must name that column",
            )
        rows = [line.split("\t") for line in body]
        for number, row in enumerate(rows, start=2):
            if len(row) != len(fields):
                raise self.fault(number, f"has {len(row)} fields, not {len(fields)}")
        self._columns = {column: [row[fields.index(column)] for row in rows] for column in wanted}

    def fault(self, row: int, problem: str) -> DataError:
        return DataError(f"{self.name} row {row} {problem}", remedy="mend or remove that row")

    def column(self, name: str) -> list[str]:
        return self._columns[name]

    def index(self, name: str) -> dict[str, int]:
        """Return each key's number from 0, in numeric order; keys must be whole numbers, each once."""
        values = self.integers(name, low=0, high=INT32_MAX)
        seen: set[int] = set()
        for row, value in enumerate(values.tolist(), start=2):
            if value in seen:
                raise self.fault(row, f"has the {name.split(':')[0]} {value} a second time")
            seen.add(value)
        ordered = sorted(zip(values.tolist(), self.column(name), strict=True))
        return {key: number for number, (_, key) in enumerate(ordered)}

    def lookup(self, name: str, index: dict[str, int], home: str) -> Ints:
        """Return the numbers of the keys in a column; each must stand in the file `home`."""
        out = np.empty(len(self.column(name)), dtype=np.int64)
        for i, key in enumerate(self.column(name)):
            number = index.get(key)
            if number is None:
                raise self.fault(i + 2, f"has the {name.split(':')[0]} {key[:40]!r}, which {home} does not have")
            out[i] = number
        return out

    def integers(self, name: str, *, low: int, high: int) -> Ints:
        """Return a column of whole numbers in low..high."""
        out = np.empty(len(self.column(name)), dtype=np.int64)
        for i, text in enumerate(self.column(name)):
            if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
                raise self.fault(i + 2, f"has {name.split(':')[0]} {text[:40]!r}, not a whole number in {low}..{high}")
            out[i] = int(text)
        return out

    def floats(self, name: str, *, low: float, high: float) -> NDArray[np.float64]:
        """Return a column of numbers in low..high."""
        out = np.empty(len(self.column(name)), dtype=np.float64)
        for i, text in enumerate(self.column(name)):
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not low <= value <= high:
                raise self.fault(i + 2, f"has {name.split(':')[0]} {text[:40]!r}, not a number in {low:g}..{high:g}")
            out[i] = value
        return out


class _Numbers(NamedTuple):
    ids: Ints
    size: int


def _numbered(values: Sequence[str]) -> _Numbers:
    """Number texts from 0 in alphabetic order."""
    index = {value: number for number, value in enumerate(sorted(set(values)))}
    return _Numbers(np.array([index[value] for value in values], dtype=np.int64), len(index))


def _year_bucket(text: str) -> int:
    """Return the five-year bucket of a release year; 0 where the year is unknown."""
    year = int(text) if text.isascii() and text.isdigit() else 0
    return min(max((year - FIRST_YEAR) // YEARS_PER_BUCKET + 1, 0), YEAR_BUCKETS - 1)
