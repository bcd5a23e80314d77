"""`quality`: held-out AUC and normalised entropy of a tuned job over seeds, beside simple scores, on both splits.

A seed sets the weights, the order of the samples and dropout, nothing else. Training is what `twinstep train` does; the
job's settings were chosen on training events alone (see the spec). Baselines have no seed, so no spread.
With `--keep DIRECTORY` each run's scores are kept there, and a later call with the same spec goes on from them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from bench.child import ROOT, Child
from bench.measure import Say, as_line, as_page, result, seeds_spread, versions
from twinstep.spec.job import JobSpec
from twinstep.worker.train import run_spec

EXAMPLE = ROOT / "examples/ml-100k-quality.yaml"
SEEDS = (0, 1, 2, 3, 4)
SPLITS = ("time", "user")
# Compiled once, by the first run; the others take the program from the cache.
# tests/system/test_train_backends_agree.py holds the backends to one loss curve.
BACKEND = "inductor"
MARGIN = 0.01  # of AUC, by which the model is to be better than logistic regression


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    spec: Mapping[str, Any]
    seeds: tuple[int, ...] = SEEDS
    splits: tuple[str, ...] = SPLITS
    """The first is the one whose scores stand at the top of the result."""
    backend: str = BACKEND


class Trainer:
    """Trains jobs, one after the other, in a child process."""

    def train(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Train `spec` and return its summary."""
        return run_spec(JobSpec.model_validate(spec), quiet=True).model_dump(mode="json")

    def logistic_regression(self, spec: dict[str, Any]) -> float | None:
        """Return the held-out AUC of logistic regression on user and item ids, on the data of `spec`."""
        from twinstep.worker.data.baselines import logistic_regression_auc
        from twinstep.worker.data.datasets import Dataset, load_dataset

        dataset = load_dataset(JobSpec.model_validate(spec).data)
        return logistic_regression_auc(dataset) if isinstance(dataset, Dataset) else None


def full() -> Size:
    """Return the example job with all seeds and splits."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["train"] = {**spec.get("train", {}), "eval_every": 0}  # scores on the way are not asked for
    return Size(spec=spec)


def run(size: Size | None = None, *, say: Say, keep: Path | None = None) -> dict[str, Any]:
    """Train and return the result.

    Args:
        keep: directory of the scores of runs that are done; they are not done again.

    Raises:
        TwinstepError: the dataset is missing, or a run failed.
    """
    size = size or full()
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in size.splits}
    with tempfile.TemporaryDirectory(prefix="twinstep-bench-") as cache, Child("bench.quality:Trainer", {}) as child:
        for seed in size.seeds:
            for split in size.splits:
                say(f"split by {split}, seed {seed}")
                spec = job(size, split=split, seed=seed, cache_dir=Path(cache))
                found[split].append(kept(keep, spec, lambda spec: child.call("train", spec=spec)))
        ids = {
            split: child.call(
                "logistic_regression", spec=job(size, split=split, seed=size.seeds[0], cache_dir=Path(cache))
            )
            for split in size.splits
        }
    splits = {split: _scores(summaries, ids[split]) for split, summaries in found.items()}
    first = splits[size.splits[0]]
    summary = found[size.splits[0]][0]
    body = {
        "auc": first["auc"],
        "ne": first["ne"],
        "baselines": first["baselines"],
        "splits": splits,
        "seeds": list(size.seeds),
        "backend": size.backend,
        "steps": summary["steps"],
        "parameters": summary["parameters"],
        "train_s": statistics.median(each["train_s"] for summaries in found.values() for each in summaries),
        "spec": dict(size.spec),
    }
    return result("quality", body, runs=len(size.seeds))


def kept(keep: Path | None, spec: dict[str, Any], train: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run: what is kept of the same spec and versions, or else what `train` gives now."""
    if keep is None:
        return train(spec)
    told = {**spec, "compile": {"backend": spec["compile"]["backend"]}}  # its cache directory changes nothing
    digest = hashlib.sha256(as_line({"spec": told, "versions": versions()}).encode()).hexdigest()[:16]
    path = keep / f"{spec['data']['split']['by']}-{spec['train']['seed']}-{digest}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    summary = train(spec)
    keep.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(as_page(summary))
    unfinished.rename(path)
    return summary


def job(size: Size, *, split: str, seed: int, cache_dir: Path) -> dict[str, Any]:
    """Return the job's spec with a split and a seed, and a compile cache that ends with the benchmark."""
    spec = dict(size.spec)
    data, train = dict(spec.get("data", {})), dict(spec.get("train", {}))
    data["split"] = {**data.get("split", {}), "by": split}
    train["seed"] = seed
    return spec | {
        "data": data,
        "train": train,
        "compile": {"backend": size.backend, "cache_dir": str(cache_dir)},
    }


def _scores(summaries: list[dict[str, Any]], logistic_regression: float | None) -> dict[str, Any]:
    # The baselines have no seed; those of the first run are those of all. A score is None where one class was seen.
    baselines = {name: score["auc"] for name, score in summaries[0]["baselines"].items()}
    baselines["logistic_regression"] = logistic_regression
    aucs = [each["auc"] for each in summaries if each["auc"] is not None]
    better = statistics.fmean(aucs) - logistic_regression if aucs and logistic_regression is not None else None
    return {
        **{
            name: seeds_spread([each[name] for each in summaries])
            for name in ("auc", "ne")
            if all(each[name] is not None for each in summaries)
        },
        "baselines": baselines,
        "better_by": better,
        "better_by_margin": better is not None and better >= MARGIN,
        "eval_examples": summaries[0]["eval_examples"],
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the result as a table for people."""
    page = Table(
        title=f"{found['spec']['name']}: held-out scores over {found['runs']} seeds, {found['steps']} steps",
        caption=f"mean ± standard deviation; trained on {found['backend']}; (…) baselines, which have no seed",
    )
    for name in ("split", "model", "AUC", "AUC least–most", "NE", "NE least–most"):
        page.add_column(name, justify="left" if name in ("split", "model") else "right")
    for split, scores in found["splits"].items():
        cells = []
        for name in ("auc", "ne"):
            each = scores.get(name)
            cells += (
                [f"{each['mean']:.4f} ± {each['std']:.4f}", f"{each['min']:.4f}–{each['max']:.4f}"]
                if each
                else ["–"] * 2
            )
        page.add_row(split, "DLRMv3", *cells)
        if scores["better_by"] is not None:
            said = "" if scores["better_by_margin"] else f", less than {MARGIN}"
            page.add_row(split, f"(over logistic regression{said})", f"{scores['better_by']:+.4f}", "", "", "")
        for name, auc in scores["baselines"].items():
            page.add_row(split, f"({name})", "–" if auc is None else f"{auc:.4f}", "", "", "")
    return page
