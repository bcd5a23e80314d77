"""The grid of `tpu`: whole train steps for TPU slices of 4 chips to the largest, whose tables an engine of TPUs holds.

DLRMv3 with its tables in a ring and on SparseCores, DLRM with 26 tables on SparseCores. From 4 to 128 chips a model's
spec is the same but for `topology`. At 128 chips DLRM's step is compiled at full effort as well, pipelined and one part
after the other, for what the schedule runs beside the SparseCores' calls. The largest slice has a batch that divides
over its devices, and limits that are given: counting what each of its 36,864 SparseCores asks of each other one is not
for this machine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.aot_report import Effort

SLICES = (
    "v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x8", "v6e:2x2", "v6e:4x4", "v6e:8x16", "v7x:2x2x1", "v7x:4x4x8",
)  # fmt: skip
LARGEST = "v7x:16x24x24"
"""The most chips that the generation has, 144 cubes of 64; libtpu takes the topology."""
OVERLAP = "v5p:4x4x8"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCase:
    """One step for one slice."""

    topology: str
    model: str
    engine: str
    spec: Mapping[str, Any]
    effort: Effort = "quick"
    pipeline: str = "off"

    @property
    def name(self) -> str:
        """What its report's file is called."""
        more = "".join(f"-{part}" for part in (self.pipeline, self.effort) if part not in ("off", "quick"))
        return f"{self.topology.replace(':', '-')}-{self.model}-{self.engine}{more}"

    def job(self) -> JobSpec:
        """Return the spec for the slice."""
        asked = parse_slice(self.topology)
        embedding = {**self.spec["embedding"], "engine": self.engine}
        if self.engine == "sparsecore":
            embedding["pipeline"] = self.pipeline
        else:
            embedding.pop("limits", None)
        accelerator = {"kind": "tpu", "generation": asked.generation, "topology": asked.topology}
        return JobSpec.model_validate({**self.spec, "embedding": embedding, "accelerator": accelerator})


def dlrmv3(batch_size: int = 512) -> dict[str, Any]:
    """Return DLRMv3 with 2 layers of D = 256, 128 tokens of history, 2,097,152 items."""
    return {
        "name": "bench-slices",
        "model": {
            "embedding_dim": 64, "transducer_dim": 256, "num_layers": 2, "num_heads": 2, "linear_dim": 128,
            "attention_dim": 128, "hidden_dim": 256,
        },
        "data": {
            "dataset": "synthetic", "batch_size": batch_size, "uih_len": 128, "num_candidates": 6,
            "rows": {"item_id": 1 << 21},
        },
        "embedding": {"limits": {"batches": 1}},
    }  # fmt: skip


def dlrm(batch_size: int = 2048) -> dict[str, Any]:
    """Return DLRM with DCN-v2's cross layers and 26 tables of 64 columns; the largest has 40,000,000 rows."""
    return {
        "name": "bench-slices",
        "model": {
            "kind": "dlrm", "embedding_dim": 64, "bottom_dims": [512, 256], "over_dims": [1024, 512, 256],
            "cross_rank": 256,
        },
        "data": {
            "dataset": "synthetic-clicks",
            "batch_size": batch_size,
            "rows": {f"cat_{index}": max(40_000_000 // 3**index, 2000) for index in range(12)},
        },
        "embedding": {"limits": {"batches": 1}},
        "optimizers": {"sparse": {"kind": "adagrad"}},
    }  # fmt: skip


def given(spec: Mapping[str, Any], tables: tuple[str, ...]) -> dict[str, Any]:
    """Return a spec with the least limits that hold a few ids of every partition."""
    found = copy.deepcopy(dict(spec))
    each = {"max_ids": 8, "max_unique": 8}
    found["embedding"] = {"limits": {"source": "given", "tables": dict.fromkeys(tables, each)}}
    return found


KINDS = (("dlrmv3", "ring", dlrmv3()), ("dlrmv3", "sparsecore", dlrmv3()), ("dlrm-26", "sparsecore", dlrm()))
GRID = (
    *(
        SliceCase(topology=topology, model=model, engine=engine, spec=spec)
        for topology in SLICES
        for model, engine, spec in KINDS
    ),
    *(
        SliceCase(
            topology=OVERLAP, model="dlrm-26", engine="sparsecore", spec=dlrm(16384), effort="full", pipeline=pipeline
        )
        for pipeline in ("off", "full")
    ),
    SliceCase(topology=LARGEST, model="dlrmv3", engine="ring", spec=dlrmv3(36864)),
    SliceCase(
        topology=LARGEST,
        model="dlrmv3",
        engine="sparsecore",
        spec=given(dlrmv3(36864), ("item_id", "user_id", "segment")),
    ),
    SliceCase(
        topology=LARGEST,
        model="dlrm-26",
        engine="sparsecore",
        spec=given(dlrm(36864), tuple(f"cat_{index}" for index in range(26))),
    ),
)
