"""`pipeline`: do steps whose lookups miss one update (`embedding.pipeline: full`) learn what those without (`off`) do?

DLRMv3 on the real ratings of MovieLens-100K with the SparseCore engine, portable, several seeds each way, in turn. A
seed sets weights and order, so runs of one seed differ by staleness alone: differences are paired by seed.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.child import Child
from bench.measure import Say, result, seeds_spread

SIDES = ("off", "full")
CURVE = 10  # points of a loss curve: means over as many equal stretches of the steps
SPEC: dict[str, Any] = {
    "name": "bench-pipeline",
    "model": {"embedding_dim": 16, "transducer_dim": 32, "linear_dim": 16, "attention_dim": 16, "hidden_dim": 32,
              "num_layers": 1, "num_heads": 2, "dropout": 0.0},
    "data": {"dataset": "ml-100k", "split": {"by": "time", "eval_fraction": 0.2}, "label_threshold": 4,
             "batch_size": 32, "uih_len": 32, "num_candidates": 8},
    "optimizers": {"dense": {"kind": "adam", "lr": 0.001}, "sparse": {"kind": "rowwise_adagrad", "lr": 0.03}},
    "accelerator": "cpu",
    "compile": {"backend": "xla", "cache": False},
    "embedding": {"engine": "sparsecore", "limits": {"source": "data", "headroom": 2.0}, "overflow": "minibatch"},
    "train": {"steps": 400, "eval_every": 0},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)


FULL = Size(spec=SPEC)


class Runs:
    """Trains jobs, one after the other, in a child process."""

    def train(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Train `spec`; return its losses by step, and its held-out scores."""
        from twinstep.spec.job import JobSpec
        from twinstep.worker.train.environment import prepare_environment
        from twinstep.worker.train.loop import Trainer
        from twinstep.worker.train.progress import ProgressView
        from twinstep.worker.train.report import NoReporter
        from twinstep.worker.train.stop import StopSignal

        losses: list[float] = []

        class Noted(NoReporter):
            def metric(self, step: int, values: Mapping[str, float | None]) -> None:
                if (loss := values.get("loss")) is not None:
                    losses.append(loss)

        job = JobSpec.model_validate(spec)
        prepare_environment(job)
        trainer = Trainer(job, reporter=Noted(), view=ProgressView(None, 1), stop=StopSignal(), run_dir=None)
        try:
            summary = trainer.train()
        finally:
            trainer.close()
        assert summary is not None, "nobody stops it"
        return {"losses": losses, "auc": summary.auc, "ne": summary.ne, "parameters": summary.parameters}


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Train and return the result.

    Raises:
        TwinstepError: the dataset is missing, or a run failed.
    """
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with Child("bench.pipeline:Runs", {}) as child, tempfile.TemporaryDirectory(prefix="twinstep-bench-") as cache:
        for seed in size.seeds:
            for side in SIDES:
                say(f"pipeline {side}, seed {seed}")
                found[side].append(child.call("train", spec=job(size.spec, side, seed, cache)))
    sides = {side: _scores(runs) for side, runs in found.items()}
    pairs = list(zip(found["full"], found["off"], strict=True))
    body = {
        "sides": sides,
        "full_less_off": {
            name: seeds_spread([full[name] - off[name] for full, off in pairs])
            for name in ("auc", "ne")
            if all(each[name] is not None for runs in found.values() for each in runs)
        },
        "seeds": list(size.seeds),
        "parameters": found["off"][0]["parameters"],
        "spec": dict(size.spec),
    }
    return result("pipeline", body, runs=len(size.seeds))


def job(spec: Mapping[str, Any], side: str, seed: int, cache: str) -> dict[str, Any]:
    """Return a run's spec; programs are kept between seeds, and end with the benchmark."""
    return {
        **spec,
        "embedding": {**spec["embedding"], "pipeline": side},
        "train": {**spec["train"], "seed": seed},
        "compile": {"backend": "xla", "cache_dir": cache},
    }


def curve(losses: list[float], points: int = CURVE) -> list[float]:
    """Return means of equal stretches of losses."""
    edges = [number * len(losses) // points for number in range(points + 1)]
    return [statistics.fmean(losses[low:high]) for low, high in itertools.pairwise(edges) if high > low]


def _scores(runs: list[dict[str, Any]]) -> dict[str, Any]:
    curves = [curve(each["losses"]) for each in runs]
    scores = {
        name: seeds_spread([each[name] for each in runs])
        for name in ("auc", "ne")
        if all(each[name] is not None for each in runs)
    }
    return {
        **scores,
        "steps": len(runs[0]["losses"]),
        "loss_curve": [statistics.fmean(at) for at in zip(*curves, strict=True)],
        "last_loss": seeds_spread([each[-1] for each in curves]),
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    less = found["full_less_off"]
    said = "; ".join(f"{name.upper()} {each['mean']:+.4f} ± {each['std']:.4f}" for name, each in less.items())
    page = Table(
        title=f"ml-100k, {found['sides']['off']['steps']} steps, {found['runs']} seeds: pipeline off and full",
        caption=f"full less off, by seed: {said}" if said else None,
    )
    for name in ("pipeline", "AUC", "NE", "loss at the end", "mean loss by tenths of the run"):
        page.add_column(name, justify="left" if name == "pipeline" else "right")
    for side, each in found["sides"].items():
        scores = [_text(each[name]) if name in each else "–" for name in ("auc", "ne")]
        page.add_row(side, *scores, _text(each["last_loss"]), " ".join(f"{at:.3f}" for at in each["loss_curve"]))
    return page


def _text(each: Mapping[str, Any]) -> str:
    return f"{each['mean']:.4f} ± {each['std']:.4f}"
