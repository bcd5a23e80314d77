"""MovieLens-1M, -20M and KuaiRand as published: what is read, and what missing and broken files are answered with."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader

ML_1M = {
    "ratings.dat": "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n2::919::1::978301368\n",
    "users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n3::M::25::15::55117\n",
    "movies.dat": (
        "661::James and the Giant Peach (1996)::Animation|Children's\n919::Wizard of Oz, The (1939)::Adventure\n"
        "1193::Misérables: Les (1975)::Drama\n"
    ),
}
ML_20M = {
    "ratings.csv": "userId,movieId,rating,timestamp\n7,2,3.5,1112486027\n7,29,0.5,1112484676\n9,2,5.0,1112484819\n",
    "movies.csv": (
        'movieId,title,genres\n2,Jumanji (1995),Adventure|Children\n29,"City of Lost Children, The (2013)",Sci-Fi\n'
        "30,Untitled,(no genres listed)\n"
    ),
    "tags.csv": "userId,movieId,tag,timestamp\n",
}
LOG = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)
KUAIRAND = {
    "data/log_standard_4_08_to_4_21_1k.csv": (
        LOG + "0,5,20220408,100,1649400000500,1,0,0,0,0,0,1,30500,20000,0,0,1,0,1\n"
        "0,6,20220408,100,1649400001700,0,0,0,0,0,1,0,0,15000,0,0,0,0,1\n"
    ),
    "data/log_standard_4_22_to_5_08_1k.csv": LOG + "3,5,20220422,900,1650600000000,1,1,0,0,0,0,0,2000,20000,0,0,0,0,1\n"
    "3,6,20220422,901,1650600060000,0,0,0,0,0,0,0,0,15000,0,0,0,0,1\n",
    "data/log_random_4_22_to_5_08_1k.csv": LOG + "3,5,20220422,900,1650600000000,1,1,1,1,1,1,1,1,1,0,0,0,1,1\n",
    "data/user_features_1k.csv": (
        "user_id,user_active_degree,is_lowactive_period,follow_user_num_range,fans_user_num_range,"
        'friend_user_num_range,register_days_range\n0,full_active,0,"(0,10]","[100,1k)",0,730+\n'
        '3,high_active,0,500+,"[1,10)",0,15-30\n'
    ),
    "data/video_features_basic_1k.csv": (
        "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
        'music_id,music_type,tag\n5,441,NORMAL,2020-07-08,ShortImport,1,17200.0,720,1280,989206467,4,"12,65"\n'
        "6,,AD,2020-07-08,ShortImport,1,,720,1280,0,4,\n"
    ),
}
SETS = {"ml-1m": ML_1M, "ml-20m": ML_20M, "kuairand-1k": KUAIRAND}


def write(folder: Path, files: Mapping[str, str], *, encoding: str = "utf-8") -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode(encoding))
    return folder


def load(folder: Path, dataset: str, **data: object) -> Dataset:
    given = {"dataset": dataset, "path": str(folder), "split": {"eval_fraction": 0.4}, "batch_size": 2, "uih_len": 4}
    return load_dataset(DataSpec.model_validate(given | data))


def test_movielens_1m_is_read_with_its_users_and_films(tmp_path: Path) -> None:
    data = load(write(tmp_path, ML_1M, encoding="latin-1"), "ml-1m")
    events, schema = data.events, data.schema
    assert events.user.tolist() == [1, 0, 1, 0]  # by time
    assert events.item.tolist() == [2, 2, 1, 0]
    assert events.rating.tolist() == [4, 5, 1, 3]
    assert data.actions.tolist() == [8, 16, 1, 4]
    assert data.labels.tolist() == [[1, 1, 0, 0]]
    assert [each.name for each in schema.contextual] == ["age", "gender", "occupation", "zip_code"]
    assert events.user_features.tolist() == [[0, 0, 0, 0], [2, 1, 2, 2], [1, 1, 1, 1]]
    assert events.item_features.tolist() == [[0, 14, 1], [1, 2, 0], [2, 10, 2]]  # years by five from 1930


def test_movielens_20m_has_half_stars_quoted_titles_and_no_users(tmp_path: Path) -> None:
    data = load(write(tmp_path, ML_20M), "ml-20m")
    assert data.events.rating.tolist() == [0.5, 5, 3.5]
    assert data.actions.tolist() == [1, 512, 64]
    assert data.schema.action_bits == 10
    assert data.events.user_features.tolist() == [[0], [1]]
    assert data.events.item_features.tolist() == [[0, 14, 1], [1, 17, 2], [2, 0, 0]]


def test_kuairand_has_a_task_per_signal_and_the_seconds_watched(tmp_path: Path) -> None:
    data = load(write(tmp_path, KUAIRAND), "kuairand-1k")
    assert data.events.time.tolist() == [1649400000, 1649400001, 1650600000, 1650600060]
    assert data.actions.tolist() == [1 + 64 + 128, 32, 1 + 2, 0]  # the random log is left out
    assert [task.name for task in data.schema.tasks][:2] == ["is_click", "is_like"]
    assert data.labels.shape == (8, 4)
    assert data.labels[:, 0].tolist() == [1, 0, 0, 0, 0, 0, 1, 1]
    assert data.labels[5].tolist() == [0, 1, 0, 0]
    two = load(tmp_path, "kuairand-1k", tasks=["watch_time", "long_view"], features=["user_id", "tag"])
    assert [task.name for task in two.schema.tasks] == ["long_view", "watch_time"]
    np.testing.assert_array_equal(two.labels[1], np.float32([30.5, 0, 2, 0]))
    assert [each.name for each in two.schema.item_features] == ["video_id", "tag"]
    assert {table.name for table in two.schema.tables} == {"user_id", "video_id", "tag"}
    batch, _ = Loader(two, DataSpec(dataset="synthetic", batch_size=2, uih_len=4), seed=0).train_batch(0)
    assert batch.labels.shape == (2, 2, 8)


@pytest.mark.parametrize(
    ("dataset", "name"), [(dataset, name) for dataset, files in SETS.items() for name in files if "tags" not in name]
)
def test_a_missing_file_is_answered_with_the_layout_and_what_was_found(tmp_path: Path, dataset: str, name: str) -> None:
    write(tmp_path, {each: text for each, text in SETS[dataset].items() if each != name}, encoding="latin-1")
    if "log_" in name:  # one standard log is enough, and the random one is none
        load(tmp_path, dataset)
        for path in tmp_path.glob("data/log_standard*"):
            path.unlink()
    with pytest.raises(DataError, match=r"is missing from data\.path") as error:
        load(tmp_path, dataset)
    found = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert all(each in error.value.problem for each in found)
    assert "expected: " in error.value.problem


def test_a_folder_that_is_empty_or_not_there_or_of_no_known_protocol_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found: no files"):
        load(tmp_path, "ml-1m")
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nowhere", "ml-1m")
    with pytest.raises(DataError, match="cannot be opened"):
        load_dataset(DataSpec(dataset="ml-1m", path="nonsense://bucket/x"))


@pytest.mark.parametrize("dataset", SETS)
def test_files_may_be_compressed_and_may_have_crlf_and_a_byte_order_mark(tmp_path: Path, dataset: str) -> None:
    plain = load(write(tmp_path / "a", SETS[dataset], encoding="utf-8"), dataset)
    for name, text in SETS[dataset].items():
        mark = b"" if dataset == "ml-1m" else b"\xef\xbb\xbf"
        path = tmp_path / "b" / f"{name}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(mark + text.replace("\n", "\r\n").encode()))
    packed = load(tmp_path / "b", dataset)
    for name in ("user", "item", "rating", "time", "actions", "user_features", "item_features"):
        np.testing.assert_array_equal(getattr(plain.events, name), getattr(packed.events, name))


BROKEN = [
    ("ml-1m", "ratings.dat", "1::661::3::978302109", "1::661::3", "row 2 has 3 fields, not 4"),
    ("ml-1m", "ratings.dat", "1::661::3::", "1::662::3::", "row 2 has the MovieID '662', which movies.dat does not"),
    ("ml-1m", "ratings.dat", "1::661::3::", "1::661::6::", "row 2 has Rating '6', not a number in 1..5"),
    ("ml-1m", "ratings.dat", "1::661::3::", "1::661::nan::", "row 2 has Rating 'nan'"),
    ("ml-1m", "ratings.dat", "1::661::3::", f"{2**63}::661::3::", f"row 2 has UserID '{2**63}', not a whole number in"),
    ("ml-1m", "ratings.dat", "1::661::3::978302109", f"{'1' * 1_100_000}", "row 2 is longer than 1,048,576 bytes"),
    ("ml-20m", "ratings.csv", "9,2,5.0,1112484819", "9,2,5.0,1112484819000", "row 4 has timestamp '1112484819000'"),
    ("ml-20m", "ratings.csv", "9,2,5.0", '9,"2,5.0', "row 4 has a quotation mark that does not close"),
    ("ml-20m", "ratings.csv", "9,2,5.0", "9,2,\r5.0", "row 4 has a carriage return within it"),
    ("kuairand-1k", "data/log_standard_4_22_to_5_08_1k.csv", ",1,1,0", ",1,2,0", "row 2 has is_like '2'"),
    ("kuairand-1k", "data/log_standard_4_22_to_5_08_1k.csv", "\n3,", "\n4,", "row 2 has the user_id '4', which"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "name", "old", "new", "says"), BROKEN)
def test_a_broken_row_is_an_error_or_a_counted_skip(
    tmp_path: Path, dataset: str, name: str, old: str, new: str, says: str
) -> None:
    files = dict(SETS[dataset])
    assert old in files[name]
    write(tmp_path, files | {name: files[name].replace(old, new, 1)}, encoding="latin-1")
    with pytest.raises(DataError) as error:
        load(tmp_path, dataset)
    assert error.value.problem.startswith(f"{name} {says.split(' ')[0]} ")
    assert says in error.value.problem
    assert "data.on_bad_row: skip" in error.value.remedy
    whole = write(tmp_path / "whole", files, encoding="latin-1")
    data = load(tmp_path, dataset, on_bad_row="skip")
    assert data.left_out.count == 1
    assert len(data.events) == len(load(whole, dataset).events) - 1
    assert f"{name} {says}" in str(data.left_out.first[0])
    assert data.left_out.summary().startswith(f"1 of {data.left_out.kept + 1} rows left out ({name}: 1)")


def test_a_file_without_a_good_row_says_so_with_the_first_bad_one(tmp_path: Path) -> None:
    files = ML_1M | {"ratings.dat": ML_1M["ratings.dat"].replace("::", ",")}
    with pytest.raises(DataError, match=r"ratings.dat row 1 has 1 field, not 4"):
        load(write(tmp_path, files), "ml-1m")
    with pytest.raises(DataError, match=r"ratings.dat \(4 of 10 rows left out .*row 1 has 1 field.* holds no events"):
        load(tmp_path, "ml-1m", on_bad_row="skip")
    with pytest.raises(DataError, match=r"lacks the column 'userId'.*divided by ';', not ','"):
        load(
            write(
                tmp_path / "csv",
                {k: v.replace(",", ";") for k, v in ML_20M.items()} | {"movies.csv": ML_20M["movies.csv"]},
            ),
            "ml-20m",
        )
    with pytest.raises(DataError, match=r"ratings.dat holds no events"):
        load(write(tmp_path / "none", ML_1M | {"ratings.dat": ""}), "ml-1m")
    with pytest.raises(DataError, match=r"movies.csv lacks the column 'movieId': it is empty"):
        load(write(tmp_path / "empty", ML_20M | {"movies.csv": ""}), "ml-20m")


def test_a_truncated_archive_is_no_end_of_the_data(tmp_path: Path) -> None:
    write(tmp_path, {name: text for name, text in ML_1M.items() if name != "ratings.dat"}, encoding="latin-1")
    packed = gzip.compress(ML_1M["ratings.dat"].encode())
    (tmp_path / "ratings.dat.gz").write_bytes(packed[:-12])
    with pytest.raises(DataError, match=r"ratings.dat.gz ends within its compressed data"):
        load(tmp_path, "ml-1m", on_bad_row="skip")
    (tmp_path / "ratings.dat.gz").write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match=r"ratings.dat.gz cannot be read"):
        load(tmp_path, "ml-1m")


def test_a_copy_beside_the_data_is_not_read_as_more_of_it(tmp_path: Path) -> None:
    for dataset, files in SETS.items():
        once = load(write(tmp_path / dataset, files), dataset)
        write(tmp_path / dataset / "copy", files)
        assert len(load(tmp_path / dataset, dataset).events) == len(once.events)
    (tmp_path / "ml-1m/ratings.dat.gz").write_bytes(gzip.compress(b"1::661::3::978302109\n"))
    with pytest.raises(DataError, match=r"holds both ratings.dat and ratings.dat.gz"):
        load(tmp_path / "ml-1m", "ml-1m")


def test_a_single_event_and_users_without_events_are_no_trap(tmp_path: Path) -> None:
    one = ML_1M | {"ratings.dat": ML_1M["ratings.dat"].splitlines()[0] + "\n"}
    for by in ("time", "user"):
        with pytest.raises(DataError, match="leaves no events"):
            load(write(tmp_path, one, encoding="latin-1"), "ml-1m", split={"by": by, "eval_fraction": 0.5})
    data = load(write(tmp_path / "all", ML_1M, encoding="latin-1"), "ml-1m")  # user 3 has rated nothing
    assert data.log.start.tolist() == [0, 2, 4, 4]
    with pytest.raises(DataError, match=r"data\.tasks names 'clicked'"):
        load(tmp_path / "all", "ml-1m", tasks=["clicked"])
    with pytest.raises(DataError, match=r"data\.features names 'height'"):
        load(tmp_path / "all", "ml-1m", features=["height"])
