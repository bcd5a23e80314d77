"""One of two processes that score their own share of held-out rows: python gloo_child.py RANK WORLD STORE CASE."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import distributed, nn

from twinstep.spec.job import DataSpec
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.order import HostShare
from twinstep.worker.train.evaluate import evaluate
from twinstep.worker.train.stop import StopSignal

SPEC = DataSpec.model_validate(
    {"dataset": "synthetic", "synthetic_events": 700, "batch_size": 5, "uih_len": 6, "num_candidates": 3}
)


class Output:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Guess(nn.Module):
    """Logits that follow from a candidate's item and time alone, with many ties."""

    def forward(self, batch: Any) -> Output:
        return Output(((batch.cand_ids[0] * 7 + batch.cand_times) % 13).to(torch.float32)[None] / 5 - 1)


def scores(dataset: Dataset, *, share: HostShare, stop: StopSignal) -> dict[str, Any] | None:
    """Scores of a share's rows, with the other processes' where there are any."""
    loader = Loader(dataset, SPEC, seed=0, share=share)
    found = evaluate(Guess(), loader, dataset.schema, max_batches=None, stop=stop)
    return None if found is None else {"values": found.values(), "examples": found.examples, "words": found.words()}


def main() -> None:
    rank, world, store, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dataset = load_dataset(SPEC)
    assert isinstance(dataset, Dataset)
    if case == "one_class":
        dataset.labels[:] = 1
    stop = StopSignal()
    stop.asked = case == "stopped" and rank == 1
    print(json.dumps(scores(dataset, share=HostShare(host=rank, hosts=world, layout="rows"), stop=stop)), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
