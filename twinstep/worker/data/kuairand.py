"""KuaiRand: impressions of short videos with twelve feedback signals, from the files that its authors publish.

Format: github.com/chongminggao/KuaiRand. Each impression has eight signals that are bits of its action word, one task
each, and the seconds watched. `datasets.py` calls `read_kuairand`; the 27K and Pure versions have the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from twinstep.worker.data.badrows import BadRows, Column
from twinstep.worker.data.delimited import Delimited, Keys, first_of_each, gather, number_text, read_delimited
from twinstep.worker.data.events import (
    INT32_MAX,
    DataSchema,
    Events,
    FeatureSchema,
    TableSchema,
    TaskSchema,
    make_events,
)
from twinstep.worker.data.files import DataFile, Folder

CSV = Delimited(delimiter=",", quoted=True)
SIGNALS = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
)  # fmt: skip
"""Binary columns of the log; signal i is bit i of the action word, as in the public DLRMv3 configuration."""
TRAITS = (
    "user_active_degree", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range",
    "register_days_range",
)  # fmt: skip
LAYOUT = (
    "log_standard_*.csv (user_id,video_id,time_ms,is_click,…,play_time_ms), user_features_*.csv and "
    "video_features_basic_*.csv of KuaiRand-1K's data folder"
)
WATCH_TIME = "watch_time"


def read_kuairand(folder: Folder, bad: BadRows) -> tuple[Events, DataSchema]:
    """Read all standard logs, users and videos. The log of random exposures is left out.

    Times are milliseconds in the files and seconds in the events. An event's rating is 1 for a click, else 0.

    Raises:
        DataError: a file or column is missing, or a row breaks its format; the message names file and row.
    """
    logs = folder.files("log_standard_*.csv", layout=LAYOUT)
    people = folder.files("user_features_*.csv", layout=LAYOUT)[0]
    shelf = folder.files("video_features_basic_*.csv", layout=LAYOUT)[0]
    users = first_of_each(people.name, "user_id", gather(
        chunk.keep(bad, rows=chunk.rows, user_id=chunk.integers("user_id", low=0),
                   **{trait: chunk.text(trait) for trait in TRAITS})
        for chunk in read_delimited(people, CSV, ("user_id", *TRAITS))
    ), bad)  # fmt: skip
    videos = first_of_each(shelf.name, "video_id", gather(
        chunk.keep(bad, rows=chunk.rows, video_id=chunk.integers("video_id", low=0),
                   author=chunk.integers("author_id", low=0, empty=-1), kind=chunk.text("video_type"),
                   tag=pc.list_element(pc.split_pattern(chunk.text("tag"), ",", max_splits=1), 0))
        for chunk in read_delimited(shelf, CSV, ("video_id", "author_id", "video_type", "tag"))
    ), bad)  # fmt: skip
    keys = Keys(users["user_id"], people.name), Keys(videos["video_id"], shelf.name)
    log = gather(part for file in logs for part in _impressions(file, keys, bad))
    source = ", ".join(file.name for file in logs)
    return _events(users, videos, log, f"{source} ({bad.summary()})" if bad.count else source)


def _impressions(file: DataFile, keys: tuple[Keys, Keys], bad: BadRows) -> Iterator[dict[str, Column]]:
    people, shelf = keys
    for chunk in read_delimited(file, CSV, ("user_id", "video_id", "time_ms", "play_time_ms", *SIGNALS)):
        bits = [chunk.integers(signal, low=0, high=1) << place for place, signal in enumerate(SIGNALS)]
        yield chunk.keep(
            bad,
            user=chunk.numbers("user_id", people),
            item=chunk.numbers("video_id", shelf),
            time=chunk.integers("time_ms", low=0, high=INT32_MAX * 1000) // 1000,
            actions=np.bitwise_or.reduce(bits),
            watch=(chunk.floats("play_time_ms", low=0, high=float(INT32_MAX)) / 1000).astype(np.float32),
        )


def _events(
    users: dict[str, Column], videos: dict[str, Column], log: dict[str, Column], source: str
) -> tuple[Events, DataSchema]:
    authors, author = np.unique(videos["author"], return_inverse=True)
    people = {"user_id": (np.arange(len(users["user_id"])), len(users["user_id"]))}
    people |= {trait: number_text(users[trait]) for trait in TRAITS}
    items = {
        "video_id": (np.arange(len(author)), len(author)),
        "author_id": (author, len(authors)),
        "video_type": number_text(videos["kind"]),
        "tag": number_text(videos["tag"]),
    }
    events = make_events(
        **log,
        rating=(log["actions"] & 1).astype(np.float32),
        user_features=np.stack([ids for ids, _ in people.values()], axis=1),
        item_features=np.stack([ids for ids, _ in items.values()], axis=1),
        source=source,
    )
    schema = DataSchema(
        tables=tuple(TableSchema(name=table, rows=max(1, rows)) for table, (_, rows) in (people | items).items()),
        contextual=tuple(FeatureSchema(name=table, table=table) for table in people),
        item_features=tuple(FeatureSchema(name=table, table=table) for table in items),
        tasks=(
            *(TaskSchema(name=signal, bits=1 << place) for place, signal in enumerate(SIGNALS)),
            TaskSchema(name=WATCH_TIME, kind="regression"),
        ),
        action_bits=len(SIGNALS),
    )
    return events, schema
