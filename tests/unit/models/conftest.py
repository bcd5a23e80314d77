"""The public model's numbers, and the way from its jagged inputs to our packed ones."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinstep.worker.data.batch import Batch
from twinstep.worker.models.config import (
    ContextualConfig,
    DLRMv3Config,
    ItemFeatureConfig,
    STUConfig,
    TableConfig,
    TaskConfig,
)

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
NpzReader = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def npz() -> NpzReader:
    """Return a reader of the public model's numbers: all of them where they are, else the part that is kept here."""
    places = [Path(os.environ.get("TWINSTEP_FIXTURES", ROOT.parent / "shared" / "fixtures")), GOLDEN]

    def read(name: str) -> dict[str, np.ndarray]:
        found = next((place / name for place in places if (place / name).is_file()), None)
        if found is None:
            pytest.skip(f"{name} is too large to be kept here; set TWINSTEP_FIXTURES to a directory that has it")
        with np.load(found, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}

    return read


@pytest.fixture(scope="session")
def kuairand(npz: NpzReader) -> dict[str, np.ndarray]:
    return npz("kuairand_1k_s.npz")


@pytest.fixture(scope="session")
def kuairand_config(kuairand: dict[str, np.ndarray]) -> DLRMv3Config:
    public = json.loads(str(kuairand["config_json"]))
    return DLRMv3Config(
        tables=tuple(
            TableConfig(name=name, rows=table["num_embeddings"], dim=table["embedding_dim"])
            for name, table in public["tables"].items()
        ),
        contextual=tuple(
            ContextualConfig(name=n, table=n, min_uih_length=public["contextual_feature_to_min_uih_length"].get(n, 0))
            for n in public["contextual_feature_to_max_length"]
        ),
        item_features=(ItemFeatureConfig(name="video_id", table="video_id"),),
        tasks=tuple(TaskConfig(name=task["task_name"]) for task in public["multitask_configs"]),
        action_masks=tuple(public["action_weights"]),
        layer=STUConfig(
            dim=public["hstu_transducer_embedding_dim"],
            num_heads=public["hstu_num_heads"],
            linear_dim=public["hstu_attn_linear_dim"],
            attention_dim=public["hstu_attn_qk_dim"],
        ),
        num_layers=public["hstu_attn_num_layers"],
        hidden_dim=public["hstu_preprocessor_hidden_dim"],
    )


@pytest.fixture(scope="session")
def kuairand_batch(kuairand: dict[str, np.ndarray], kuairand_batch_of: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a function from (batch number, slots U, tokens T, slots K) to our Batch."""
    return functools.partial(kuairand_batch_of, kuairand)


@pytest.fixture(scope="session")
def kuairand_batch_of(kuairand_config: DLRMv3Config) -> Callable[..., Batch]:
    """Return the same function, which takes the fixture's arrays first."""

    def build(fixture: dict[str, np.ndarray], number: int, *, slots: int, tokens: int, num_candidates: int) -> Batch:
        uih = _jagged(fixture, f"batch{number}/uih")
        cand = _jagged(fixture, f"batch{number}/candidates")
        masks = np.array(kuairand_config.action_masks)
        return pack(
            histories={k: uih[v] for k, v in HISTORY.items()},
            candidates={"ids": cand["item_video_id"], "times": cand["item_query_time"]},
            contextual=np.array([[int(row[0]) for row in uih[c.name]] for c in kuairand_config.contextual]).T,
            labels=[(row[None, :] & masks[:, None] > 0) for row in cand["item_action_weight"]],
            slots=slots,
            tokens=tokens,
            num_candidates=num_candidates,
        )

    return build


HISTORY = {"ids": "video_id", "times": "action_timestamp", "actions": "action_weight"}


def _jagged(fixture: dict[str, np.ndarray], name: str) -> dict[str, list[np.ndarray]]:
    keys, values, lengths = (fixture[f"{name}/{part}"] for part in ("keys", "values", "lengths"))
    parts = np.split(values, np.cumsum(lengths)[:-1])
    rows = len(lengths) // len(keys)
    return {str(key): parts[i * rows : (i + 1) * rows] for i, key in enumerate(keys)}


def pack(
    *,
    histories: dict[str, list[np.ndarray]],
    candidates: dict[str, list[np.ndarray]],
    contextual: np.ndarray,
    labels: list[Any],
    slots: int,
    tokens: int,
    num_candidates: int,
) -> Batch:
    """Build a Batch by plain loops: a second writing of what the loader does, to check models against."""
    rows, width = len(histories["ids"]), num_candidates
    aligned = tokens == rows * slots
    uih = {name: torch.zeros(tokens, dtype=torch.int64) for name in ("ids", "times", "actions")}
    token_slot = torch.full((tokens,), rows * slots)
    slot_token = torch.full((rows, slots), tokens)
    cand = {name: torch.zeros(rows, width, dtype=torch.int64) for name in ("ids", "times")}
    query = torch.zeros(rows, dtype=torch.int64)
    label = torch.zeros(len(labels[0]), rows, width)
    weight = torch.zeros(len(labels[0]), rows, width)
    token = 0
    for b in range(rows):
        for j in range(len(histories["ids"][b])):
            at = b * slots + j if aligned else token
            for name, column in uih.items():
                column[at] = int(histories[name][b][j])
            token_slot[at], slot_token[b, j] = b * slots + j, at
            query[b] = int(histories["times"][b][j])
            token += 1
        for k in range(len(candidates["ids"][b])):
            for name, table in cand.items():
                table[b, k] = int(candidates[name][b][k])
            query[b] = int(candidates["times"][b][k])
            weight[:, b, k] = 1
            label[:, b, k] = torch.as_tensor(labels[b][:, k])
    lengths = [len(part) for part in histories["ids"]]
    counts = [len(part) for part in candidates["ids"]]
    return Batch(
        uih_ids=uih["ids"][None],
        uih_times=uih["times"],
        uih_actions=uih["actions"],
        token_slot=token_slot,
        slot_token=slot_token,
        uih_lengths=torch.tensor(lengths),
        contextual_ids=torch.as_tensor(contextual),
        cand_ids=cand["ids"][None],
        cand_times=cand["times"],
        num_candidates=torch.tensor(counts),
        query_times=query,
        labels=label,
        weights=weight,
        n=torch.tensor(float(contextual.shape[1] + max(lengths) + max(counts))),
    )
