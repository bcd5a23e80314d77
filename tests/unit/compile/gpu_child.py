"""Run by test_gpu_captures.py in a process of its own: PyTorch is given a device that stands for a GPU.

A build of PyTorch for CPUs knows no CUDA tensor, not even a fake one. Fake tensors on a device of our own have the
rules that matter: ops that mix devices refuse them. `python gpu_child.py CASE` prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import backend_registration

from twinstep.spec.parse import validate_spec
from twinstep.worker.compile import capture as captures
from twinstep.worker.compile import strategies, updates
from twinstep.worker.compile.lower.inductor import InductorBackend, write_back
from twinstep.worker.compile.lower.inductor_pieces import split
from twinstep.worker.compile.partition import fold
from twinstep.worker.compile.passes import fused_attention
from twinstep.worker.compile.state import TrainState
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_model
from twinstep.worker.train.step import make_train_step

GPU = "pretend"
MODELS: dict[str, dict[str, Any]] = {
    "dlrmv3": {
        "model": {
            "embedding_dim": 8, "transducer_dim": 8, "linear_dim": 4, "attention_dim": 4, "hidden_dim": 8,
            "num_layers": 2,
        },
        "data": {
            "dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8, "num_candidates": 2,
            "rows": {"item_id": 5000},
        },
    },
    "dlrm": {
        "model": {
            "kind": "dlrm", "embedding_dim": 8, "bottom_dims": [8], "over_dims": [8], "num_cross_layers": 1,
            "cross_rank": 4,
        },
        "data": {
            "dataset": "synthetic-clicks", "synthetic_events": 400, "batch_size": 8,
            "synthetic": {"table_rows": [5000, 50], "max_ids": 3},
        },
    },
}  # fmt: skip
CASES = {
    "dlrmv3": ("dlrmv3", "rowwise_adagrad"),
    "dlrm": ("dlrm", "rowwise_adagrad"),
    "dlrm with adagrad": ("dlrm", "adagrad"),
}


def on_gpu(example: Sequence[Tensor]) -> list[Tensor]:
    """Return a step's inputs as a GPU's process has them: step counts and learning rates stay on the host."""
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True):
        return [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=_home(index, each))
            for index, each in enumerate(example)
        ]


def _home(index: int, tensor: Tensor) -> str:
    counts = tensor.dim() == 0 and index not in BATCH
    return "cpu" if counts else GPU


BATCH: set[int] = set()
"""Positions of the batch's leaves, all of which go to the GPU."""


def computed(graph: fx.GraphModule) -> dict[str, list[str]]:
    """Return what a graph computes, by device."""
    found: dict[str, list[str]] = {}
    for node in graph.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")) if node.op == "call_function" else ():
            if isinstance(leaf, Tensor):
                found.setdefault(leaf.device.type, []).append(f"{node.name} {list(leaf.shape)}")
    return {kind: nodes[:8] for kind, nodes in found.items()}


def main(name: str, sparse: str) -> None:
    """Capture a step, cut its updates off, and say where things are."""
    backend_registration._setup_privateuseone_for_python_backend(GPU)  # type: ignore[no-untyped-call]
    found, lacks = importlib.util.find_spec, fused_attention._lacks
    importlib.util.find_spec = lambda name, *more: object() if name == "triton" else found(name, *more)  # type: ignore
    fused_attention._lacks = lambda kinds: lacks({"cuda" if each == GPU else each for each in kinds})
    captures._without_values = on_gpu
    updates.has_kernel = lambda name, device: device == GPU and name != "adagrad"  # as PyTorch was for long
    optimizers = {"dense": {"kind": "adam"}, "sparse": {"kind": sparse}}
    spec = validate_spec({"name": "t", **MODELS[name], "optimizers": optimizers})
    dataset = load_dataset(spec.data)
    model = build_model(spec, dataset.schema)
    batch = Loader(dataset, spec.data, seed=0).train_batch(0)[0]
    state = TrainState(model, build_optimizers(spec.optimizers, model))
    start = len(state.slots) + state.num_rates()
    BATCH.update(range(start, start + len(batch)))
    backend = InductorBackend(state, cache_dir=None)
    captured = captures.capture(
        make_train_step(clip_norm=1.0),
        state,
        state.optimizers,
        batch,
        backend.decompositions(),
        backend="inductor",
        strategies=strategies.resolve(None),
    )
    cut, said = updates.cut_updates(captured, state, backend.decompositions())
    graph, _ = write_back(cut.captured)
    fold(graph, captured.context, "inductor")
    pieces, _ = split(graph)
    notes = captured.context.notes
    told = {
        "attention": sum(node.target in fused_attention.OPERATORS for node in captured.graph.graph.nodes),
        "attention note": notes.get("fused_attention"),
        "rows": bool(notes.get("sparse_embedding")),
        "fused": [kernel for kernel, _ in said["fused"]],
        "left": said["left"],
        "computed": [computed(piece) for piece in pieces],
    }
    print(json.dumps(told, default=str), flush=True)


if __name__ == "__main__":
    main(*CASES[sys.argv[1]])
