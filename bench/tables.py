"""One train step over a large table, as `sparse.py` and `table_size.py` compare it; each variant is a child process.

The model is DLRMv3 at the shape of `step.py` with two layers, so that the table is a part of a real step and not all of
it. Item ids are drawn evenly over the whole table: the dataset's own items would all lie in its first pages.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.variants import BATCHES, Variant, give_back, reset_peak, status
from twinstep.worker.data.batch import Batch
from twinstep.worker.embedding.collection import EmbeddingTable

TABLE = "item_id"


def spec_with(rows: int) -> dict[str, Any]:
    """Return the job with a table of `rows` × 64, by Adagrad; all else by Adam."""
    return {
        "name": "bench-tables",
        "model": {"embedding_dim": 64, "transducer_dim": 64, "num_layers": 2, "num_heads": 4},
        "data": {
            "dataset": "ml-100k",
            "batch_size": 32,
            "uih_len": 128,
            "num_candidates": 8,
            "rows": {TABLE: rows},
        },
        "optimizers": {"dense": {"kind": "adam"}, "sparse": {"kind": "adagrad"}},
    }


class TableVariant(Variant):
    """A variant of `variants.py`, or `eager_sparse`: eager with gradients that are torch's sparse tensors.

    Args:
        variant: eager, eager_sparse, inductor or xla.
        spec: the job.
        cache_dir: where what was compiled goes.
    """

    def __init__(self, *, variant: str, spec: dict[str, Any], cache_dir: str) -> None:
        if variant == "eager_sparse":
            EmbeddingTable.forward = _sparse_forward  # type: ignore[method-assign]
        super().__init__(variant=variant.removesuffix("_sparse"), spec=spec, cache_dir=cache_dir)
        batches = list(itertools.islice(self._batches, BATCHES))
        rows = spec["data"].get("rows", {}).get(TABLE)
        if rows is not None:
            batches = [spread(batch, rows, seed=number) for number, batch in enumerate(batches)]
        self._batches = itertools.cycle(batches)

    def beyond_state(self, rounds: int) -> list[float]:
        """Return of each round of two steps the peak of resident memory less what was held before it, in MiB.

        Nothing where the system does not tell.
        """
        found = []
        for _ in range(rounds):
            give_back()
            held = status("VmRSS")
            if not reset_peak():
                return []
            self.steps(2)
            peak = status("VmHWM")
            if held is None or peak is None:
                return []
            found.append((peak - held) / 1024)
        return found


def spread(batch: Batch, rows: int, *, seed: int) -> Batch:
    """Return the batch with its first item feature's ids drawn evenly from all of the table's rows."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[0] = torch.randint(rows, ids[0].shape, generator=generator)
        return ids

    return batch._replace(uih_ids=drawn(batch.uih_ids), cand_ids=drawn(batch.cand_ids))


def _sparse_forward(self: EmbeddingTable, ids: Tensor) -> Tensor:
    return F.embedding(ids, self.weight, sparse=True)
