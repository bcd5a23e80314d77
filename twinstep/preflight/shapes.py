"""What a spec's dataset decides of the model: tables, features, tasks, counted without reading it.

Sizes of synthetic data follow from the spec, of published data they are known, of a user's own Parquet files only what
the spec says. `parameters.py` makes the model's tensors of them. Held by test to what `worker/data/` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinstep.spec.job import DATASETS_OF_ROWS, DataSpec
from twinstep.spec.synthetic import MAX_IDS, SEGMENTS, TABLE_ROWS, items_of, users_of

STARS, HALF_STARS = 5, 10  # bits of an action word that holds a rating


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding table."""

    name: str
    rows: int
    exact: bool = True
    """False: `rows` is the most there can be, or 0 where nothing is known before the data is read."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One feature, and the table that it is looked up in."""

    name: str
    table: str
    max_ids: int = 1
    """Ids of a row, of a multi-hot feature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShape:
    """What a model must know of its data to have a size."""

    tables: tuple[Table, ...]
    contextual: tuple[Lookup, ...] = ()
    """C: one id per row each."""
    item_features: tuple[Lookup, ...] = ()
    """F: one id per event and candidate each."""
    bags: tuple[Lookup, ...] = ()
    """Multi-hot features, of rows."""
    dense: int = 0
    """Dense features, of rows."""
    tasks: int = 1
    """Q."""
    action_bits: int = STARS
    """J."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Tables whose rows nothing says."""
        return tuple(table.name for table in self.tables if not table.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    """A published dataset of histories. Rows of tables by name; a negative number: at most so many; 0: not known."""

    contextual: Mapping[str, int]
    item_features: Mapping[str, int]
    tasks: tuple[str, ...] = ("liked",)
    """Binary ones."""
    regressions: tuple[str, ...] = ()
    action_bits: int = STARS


_SIGNALS = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
)  # fmt: skip
PUBLISHED: Mapping[str, _Published] = {
    "ml-100k": _Published(
        contextual={"age": 8, "gender": 2, "occupation": 21},
        item_features={"item_id": 1682, "release_year": 16, "genre": 19},
    ),
    "ml-1m": _Published(
        contextual={"age": 7, "gender": 2, "occupation": 21, "zip_code": 3439},
        item_features={"item_id": 3883, "release_year": 16, "genre": -18},
    ),
    "ml-20m": _Published(
        contextual={"user_id": 138_493},
        item_features={"item_id": 27_278, "release_year": 20, "genre": -20},
        action_bits=HALF_STARS,
    ),
    "kuairand-1k": _Published(
        contextual={
            "user_id": 1000, "user_active_degree": -16, "follow_user_num_range": -16, "fans_user_num_range": -16,
            "friend_user_num_range": -16, "register_days_range": -16,
        },
        item_features={"video_id": 4_369_953, "author_id": -4_369_954, "video_type": -8, "tag": -128},
        tasks=_SIGNALS,
        regressions=("watch_time",),
        action_bits=len(_SIGNALS),
    ),
    "streaming": _Published(
        contextual={"user_id": 0}, item_features={"item_id": 0, "item_category_id": 0}, tasks=("rating",),
    ),
}  # fmt: skip
"""Sources: the README of each set (files.grouplens.org/datasets/movielens) and github.com/chongminggao/KuaiRand."""

CRITEO_ROWS, CRITEO_DENSE, CRITEO_TABLES = 100_000, 13, 26
"""Rows of a table of `criteo` where data.hash_rows does not say; its dense features and tables."""


def data_shape(spec: DataSpec) -> DataShape:
    """Return the shape of a spec's data, with the rows, features and tasks that the spec chooses."""
    if spec.dataset in DATASETS_OF_ROWS:
        found = _clicks(spec) if spec.dataset == "synthetic-clicks" else _criteo(spec)
    else:
        found = _chosen(spec, _histories(spec))
    return replace(found, tables=tuple(_enlarged(table, spec.rows.get(table.name, 0)) for table in found.tables))


def rows_field(spec: DataSpec, table: str) -> str:
    """Return the field of a spec that a table's rows come from."""
    own = {each.name: each.rows for each in data_shape(spec.model_copy(update={"rows": {}})).tables}
    asked = spec.synthetic
    if spec.rows.get(table, 0) > own[table] or not own[table]:
        return f"data.rows.{table}"
    if table in spec.hash_rows:
        return f"data.hash_rows.{table}"
    if spec.dataset == "synthetic-clicks":
        return "data.synthetic.table_rows"
    if spec.dataset != "synthetic":
        return "data.dataset"
    for part, named in (("user_features", asked.user_features), ("item_features", asked.item_features)):
        if table in named:
            return f"data.synthetic.{part}.{table}"
    return {"user_id": "data.synthetic.users", "item_id": "data.synthetic.items"}.get(table, "data.dataset")


def _enlarged(table: Table, asked: int) -> Table:
    return table if asked <= table.rows and table.exact else Table(table.name, max(asked, table.rows), bool(asked))


def _clicks(spec: DataSpec) -> DataShape:
    asked = spec.synthetic
    rows = asked.table_rows or TABLE_ROWS
    usual = MAX_IDS if asked.table_rows is None else (1,) * len(rows)
    most = usual if asked.max_ids is None else (asked.max_ids,) * len(rows)
    names = [f"cat_{index}" for index in range(len(rows))]
    return DataShape(
        tables=tuple(map(Table, names, rows)),
        bags=tuple(Lookup(name, name, ids) for name, ids in zip(names, most, strict=True)),
        dense=asked.dense,
    )


def _criteo(spec: DataSpec) -> DataShape:
    names = [f"C{index}" for index in range(1, CRITEO_TABLES + 1)]
    return DataShape(
        tables=tuple(Table(name, spec.hash_rows.get(name, CRITEO_ROWS)) for name in names),
        bags=tuple(Lookup(name, name) for name in names),
        dense=CRITEO_DENSE,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Histories:
    """All that a dataset of histories offers, before the spec chooses."""

    contextual: Mapping[str, Table]
    item_features: Mapping[str, Table]
    binary: tuple[str, ...] = ("liked",)
    regressions: tuple[str, ...] = ()
    action_bits: int = STARS


def _histories(spec: DataSpec) -> _Histories:
    if spec.dataset == "synthetic":
        return _synthetic(spec)
    if spec.dataset == "parquet":
        return _parquet(spec)
    known = PUBLISHED[spec.dataset]
    return _Histories(
        contextual={name: Table(name, abs(rows), rows > 0) for name, rows in known.contextual.items()},
        item_features={name: Table(name, abs(rows), rows > 0) for name, rows in known.item_features.items()},
        binary=known.tasks,
        regressions=known.regressions,
        action_bits=known.action_bits,
    )


def _synthetic(spec: DataSpec) -> _Histories:
    asked, events = spec.synthetic, spec.synthetic_events
    people = {"user_id": users_of(asked, events), "segment": SEGMENTS, **asked.user_features}
    things = {"item_id": items_of(asked, events), **asked.item_features}
    return _Histories(
        contextual={name: Table(name, rows) for name, rows in people.items()},
        item_features={name: Table(name, rows) for name, rows in things.items()},
    )


def _parquet(spec: DataSpec) -> _Histories:
    columns = spec.columns
    people, things = columns.user_features or (columns.user,), (columns.item, *columns.item_features)

    def tables(names: tuple[str, ...]) -> dict[str, Table]:
        return {name: Table(name, spec.hash_rows.get(name, 0), name in spec.hash_rows) for name in names}

    return _Histories(
        contextual=tables(people),
        item_features=tables(things),
        binary=(*columns.actions, *(("liked",) if columns.rating is not None else ())),
        regressions=("watch_time",) if columns.watch is not None else (),
        action_bits=len(columns.actions) or STARS,
    )


def _chosen(spec: DataSpec, found: _Histories) -> DataShape:
    """Return what of a dataset the spec takes; the item's own id always stays."""
    first = next(iter(found.item_features))
    wanted = None if spec.features is None else {*spec.features, first}
    people = [name for name in found.contextual if wanted is None or name in wanted]
    things = [name for name in found.item_features if wanted is None or name in wanted]
    known = (*found.binary, *found.regressions)
    tasks = len(found.binary) if spec.tasks is None else sum(name in known for name in spec.tasks)
    tables = {**found.contextual, **found.item_features}
    return DataShape(
        tables=tuple(tables[name] for name in (*people, *things)),
        contextual=tuple(Lookup(name, name) for name in people),
        item_features=tuple(Lookup(name, name) for name in things),
        tasks=max(tasks, 1),
        action_bits=found.action_bits,
    )
