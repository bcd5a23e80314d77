"""The command tables: what SparseCores would hold of a spec's tables, as words and as JSON."""

import json

import pytest

from twinstep.cli.app import run

SPEC = """
name: tiny
data: {dataset: synthetic, synthetic_events: 2000, batch_size: 16, uih_len: 30, uih_budget: 4, num_candidates: 2}
"""


def spec(tmp_path, text=SPEC):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return str(path)


def test_it_names_every_table_with_its_layout_and_limits(tmp_path, capsys):
    assert run(["tables", spec(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in ("user_id", "item_id", "segment", "4 devices of 4 SparseCores", "rotation", "imbalance", "waste"):
        assert words in out


def test_json_holds_what_adds_up(tmp_path, capsys):
    assert run(["tables", spec(tmp_path), "--json", "--devices", "3", "--cores", "2", "--batches", "2"]) == 0
    found = json.loads(capsys.readouterr().out)["tables"]
    assert found["cores"] == {"devices": 3, "per_device": 2, "shards": 6}
    for table in found["tables"]:
        assert table["padded_bytes"] >= table["bytes"] > 0
        assert table["waste"] == pytest.approx(1 - table["bytes"] / table["padded_bytes"], abs=1e-4)
        assert 1 <= table["imbalance"] <= 6
    for stack in found["stacks"]:
        mine = [each["padded_bytes"] for each in found["tables"] if each["stack"] == stack["stack"]]
        assert stack["bytes"] == sum(mine)
        assert stack["max_ids_per_partition"] == max(stack["observed_max_ids"])
        assert len(stack["observed_max_ids"]) == 2


def test_a_slice_gives_its_sparse_cores_and_one_without_is_refused(tmp_path, capsys):
    tpu = SPEC + "accelerator: {kind: tpu, generation: GENERATION, topology: TOPOLOGY}\n"
    v6e = tpu.replace("GENERATION", "v6e").replace("TOPOLOGY", "2x2")
    assert run(["tables", spec(tmp_path, v6e), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["cores"] == {"devices": 4, "per_device": 2, "shards": 8}
    v5e = tpu.replace("GENERATION", "v5e").replace("TOPOLOGY", "2x2")
    assert run(["tables", spec(tmp_path, v5e)]) == 2
    assert "v5e has no SparseCores" in capsys.readouterr().err
