"""Each benchmark at the smallest size at which it is still itself: real processes, real compiles, real training."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import attention, depth, loader, pipeline, preprocess, quality, recompile, sides, sparse, step, table_size
from bench.measure import as_line
from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "embedding_dim": 4, "transducer_dim": 4, "num_layers": 1, "num_heads": 1,
        "linear_dim": 4, "attention_dim": 4, "hidden_dim": 4,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 6, "num_candidates": 2},
    "optimizers": {"dense": {"kind": "sgd"}, "sparse": {"kind": "sgd"}},
}  # fmt: skip


def shown(page: Any) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(page)
    return capture.get()


def check(found: dict[str, Any]) -> None:
    """What every result has."""
    assert {"versions", "cpu", "threads", "runs"} <= set(found)
    assert json.loads(as_line(found)) == found


class Answers:
    """A child's answers, known beforehand, where what is made of them needs no compile."""

    def __init__(self, *, cache: str, compiles: int = 2) -> None:
        self._answers = {
            "first": {"seconds": 2.0, "cache": cache, "nodes": 10},
            "away": None,
            "back": {"seconds": 0.5, "compiles": compiles},
        }

    def call(self, method: str, **_: Any) -> Any:
        return self._answers[method]

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_step_times_its_variants_in_turn_and_watches_their_memory() -> None:
    said: list[str] = []
    found = step.run(step.Size(spec=TINY, variants=("eager",), runs=2, steps=2, warmup=1), say=said.append)
    check(found)
    assert said == ["eager: first step", "round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert found["ms"]["eager"] > 0
    assert found["ms_spread"]["eager"]["n"] == 2
    memory = found["memory_mib"]["eager"]
    assert 0 < memory["start"] <= memory["compile"]
    assert found["peak_mib"]["eager"] == memory["steps"] > 0
    assert "eager" in shown(step.table(found))


@pytest.mark.parametrize(("loss", "equal"), [(1.0001, True), (1.1, False), (math.nan, False)])
def test_step_holds_its_variants_to_the_same_losses(loss: float, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Answers):
        def __init__(self, factory: str, arguments: dict[str, Any], **_: Any) -> None:
            eager = arguments["variant"] == "eager"
            self._answers = {
                "first": 0.1,
                "steps": {"seconds": 0.4 if eager else 0.2, "loss": 1.0 if eager else loss},
                "memory": {"start": 1.0},
            }

    monkeypatch.setattr(sides, "Child", Told)
    found = step.run(step.Size(spec=TINY, variants=("eager", "xla"), runs=7), say=lambda text: None)
    check(found)
    assert found["equal"] is equal
    assert found["ratios"] == {"eager/xla": 2.0}
    assert found["peak_mib"] == {}
    assert "2.00" in shown(step.table(found))


def side_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> recompile.Side:
    monkeypatch.setattr(recompile.Side, "child", lambda side, cache: Answers(**answers))
    return recompile.Side(backend="xla", spec=TINY, folder=tmp_path)


def test_a_cold_start_that_a_cache_answered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_with(tmp_path, monkeypatch, cache="disk")
    with pytest.raises(TrainError, match="cold of xla was answered"):
        side.cold()
    assert side.warm_start() == 2.0


def test_a_warm_start_that_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_with(tmp_path, monkeypatch, cache="none")
    assert side.cold() == 2.0
    with pytest.raises(TrainError, match="warm_start of xla was answered by none"):
        side.warm_start()


def test_a_known_shape_that_was_compiled_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiles in (2, 3):
        side = side_with(tmp_path, monkeypatch, cache="none", compiles=compiles)
        with contextlib.ExitStack() as stack:
            side.enter(stack)
            if compiles == 2:
                assert side.known_shape() == 0.5
            else:
                with pytest.raises(TrainError, match="3 programs for two shapes"):
                    side.known_shape()


def test_quality_trains_each_seed_on_each_split() -> None:
    spec = {**TINY, "train": {"steps": 2}}
    found = quality.run(quality.Size(spec=spec, seeds=(0, 1), backend="eager"), say=lambda text: None)
    check(found)
    assert set(found["splits"]) == {"time", "user"}
    for scores in found["splits"].values():
        assert len(scores["auc"]["values"]) == 2
        assert scores["auc"]["min"] <= scores["auc"]["mean"] <= scores["auc"]["max"]
        assert set(scores["baselines"]) == {"item_mean", "popularity", "user_item_mean", "logistic_regression"}
        over = scores["auc"]["mean"] - scores["baselines"]["logistic_regression"]
        assert scores["better_by"] == pytest.approx(over, abs=1e-3)  # results are rounded
        assert scores["better_by_margin"] == (over >= 0.01)
    assert found["auc"] == found["splits"]["time"]["auc"]
    assert found["auc"]["std"] > 0
    assert "(item_mean)" in shown(quality.table(found))


def test_what_quality_has_kept_is_not_done_again_but_for_another_spec(tmp_path: Path) -> None:
    asked: list[int] = []

    def train(spec: dict[str, Any]) -> dict[str, Any]:
        asked.append(spec["train"]["seed"])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"auc": 0.7 + spec["train"]["seed"] / 100}

    size = quality.Size(spec={**TINY, "train": {"steps": 2}}, backend="eager")

    def done(seed: int, folder: str, **train_spec: int) -> dict[str, Any]:
        spec = quality.job(size, split="user", seed=seed, cache_dir=tmp_path / folder)
        return quality.kept(tmp_path / "keep", spec | {"train": spec["train"] | train_spec}, train)

    assert done(1, "a") == {"auc": 0.71}
    with pytest.raises(KeyboardInterrupt):
        done(2, "a")
    assert [done(1, "b"), done(2, "b")] == [{"auc": 0.71}, {"auc": 0.72}]  # where programs are cached changes nothing
    assert asked == [1, 2, 2]
    done(1, "a", steps=3)
    assert asked == [1, 2, 2, 1]


def test_the_specs_of_the_benchmarks_are_valid_jobs() -> None:
    for spec in (step.SPEC, recompile.SPEC, quality.full().spec):
        JobSpec.model_validate(spec)
    assert quality.full().spec["data"]["dataset"] == "ml-100k"


@pytest.mark.inductor
@pytest.mark.bench
@pytest.mark.timeout(900)  # several cold compiles, one after the other
def test_step_runs_with_every_variant_and_they_agree() -> None:
    found = step.run(step.Size(spec=TINY, runs=1, steps=1, warmup=1), say=lambda text: None)
    assert found["equal"]
    assert set(found["ratios"]) == {"eager/inductor", "torch_compile/inductor", "eager/xla"}
    assert set(found["peak_mib"]) == set(step.VARIANTS)


def test_depth_gives_the_seconds_of_each_depth_apart() -> None:
    said: list[str] = []
    found = depth.run(depth.Size(spec=TINY, depths={"xla": (1, 2)}), say=said.append)
    check(found)
    assert said == ["xla, 1 layers", "xla, 2 layers"]
    one, two = found["sides"]["xla"].values()
    assert one["nodes"] < two["nodes"]
    assert one["seconds"] == pytest.approx(one["capture_s"] + one["lower_s"], rel=1e-3)
    assert found["ratios"]["xla"]["seconds"] == pytest.approx(two["seconds"] / one["seconds"], rel=1e-2)
    assert "capture s" in shown(depth.table(found))


@pytest.mark.bench
@pytest.mark.timeout(900)  # several cold compiles, one after the other
@pytest.mark.parametrize("backend", ["inductor", "xla"])
def test_recompile_tells_a_cold_start_from_a_warm_one_from_a_known_shape(backend: str) -> None:
    found = recompile.run(recompile.Size(spec=TINY, backends=(backend,), runs=1, warmup=0), say=lambda text: None)
    check(found)
    seconds = found["seconds"][backend]
    assert seconds["known_shape"] < seconds["warm_start"] < seconds["cold"]
    assert found["ratios"]["known_shape/cold"][backend] < 0.1
    assert set(found["ratios"]) == {"known_shape/cold", "warm_start/cold"}
    assert found["process_s"][backend]["cold"] > seconds["cold"]
    assert "known_shape" in shown(recompile.table(found))


@pytest.mark.bench
def test_attention_takes_turns_over_the_same_numbers_and_both_sides_agree() -> None:
    size = attention.Size(batch=4, longest=64, num_targets=3, heads=2, width=8, runs=2, warmup=1)
    found = attention.run(size, say=lambda _: None)
    check(found)
    assert found["equal"]
    assert set(found["ratios"]) == {"time", "memory"}
    assert "jagged" in shown(attention.table(found))


def test_attentions_row_lengths_are_uneven_and_one_fills_its_row() -> None:
    lengths = attention.row_lengths(attention.FULL)
    assert max(lengths) == attention.FULL.longest - attention.FULL.num_targets
    assert min(lengths) >= 1
    assert sum(lengths) < len(lengths) * max(lengths) / 2


@pytest.mark.bench
def test_sparse_times_eager_both_ways_and_finds_the_same_losses() -> None:
    spec = {**TINY, "data": {**TINY["data"], "rows": {"item_id": 5_000}}, "optimizers": {
        "dense": {"kind": "sgd"}, "sparse": {"kind": "adagrad"}}}  # fmt: skip
    size = sparse.Size(spec=spec, variants=("eager", "eager_sparse"), runs=2, steps=1, warmup=1)
    found = sparse.run(size, say=lambda text: None)
    check(found)
    assert found["equal"] is True
    assert found["ms_spread"]["eager_sparse"]["n"] == 2
    assert "eager_sparse" in shown(sparse.table(found))


class TableSizes(Answers):
    """A step that takes 0.3 s and 50 MiB beyond its state with the large table, 0.2 s and 40 MiB with the small."""

    def __init__(self, factory: str, arguments: dict[str, Any], **_: Any) -> None:
        large = arguments["spec"]["rows"] > 1
        self._answers = {
            "first": 0.1,
            "steps": {"seconds": 0.3 if large else 0.2, "loss": 1.0},
            # A buffer beside the one before it, in one round of either: chance, which no ratio is made of.
            "beyond_state": [50.0, 100.0, 50.0] if large else [40.0, 40.0, 80.0],
        }


def test_table_size_sets_the_large_table_over_the_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "Child", TableSizes)
    size = table_size.Size(specs={"small": {"rows": 1}, "large": {"rows": 2}}, backends=("xla",), runs=7)
    found = table_size.run(size, say=lambda text: None)
    check(found)
    assert found["ratios"] == {"xla_time": 1.5, "xla_memory": 1.25}
    assert "xla large" in shown(table_size.table(found))


def test_loader_and_step_take_turns_in_one_process() -> None:
    found = loader.run(loader.Size(spec=TINY, backend="eager", runs=7, batches=1, warmup=1), say=lambda text: None)
    check(found)
    assert found["ratios"]["step/pack"] == pytest.approx(found["ms"]["step"] / found["ms"]["pack"], rel=1e-2)
    assert found["samples_per_s"] > 0
    assert "on one core" in shown(loader.table(found))


class Pipelines(Answers):
    """Losses that fall from 1, a step later where lookups are stale; a seed moves both."""

    def __init__(self, factory: str, arguments: dict[str, Any], **_: Any) -> None:
        pass

    def call(self, method: str, **given: Any) -> Any:
        stale, seed = given["spec"]["embedding"]["pipeline"] == "full", given["spec"]["train"]["seed"]
        losses = [1 - 0.01 * max(step - stale, 0) + seed for step in range(40)]
        return {"losses": losses, "auc": 0.7 + 0.1 * seed - 0.02 * stale, "ne": None, "parameters": 9}


def test_pipeline_pairs_its_sides_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Child", Pipelines)
    found = pipeline.run(pipeline.Size(spec=pipeline.SPEC, seeds=(0, 1)), say=lambda text: None)
    check(found)
    assert found["full_less_off"]["auc"]["mean"] == pytest.approx(-0.02)
    assert found["full_less_off"]["auc"]["std"] == pytest.approx(0, abs=1e-9)  # of the difference, not of the seeds
    assert set(found["full_less_off"]) == {"auc"}
    assert len(found["sides"]["off"]["loss_curve"]) == pipeline.CURVE
    assert "AUC -0.0200" in shown(pipeline.table(found))


@pytest.mark.bench
def test_pipeline_trains_both_ways_on_one_seed() -> None:
    spec = {**pipeline.SPEC, "data": TINY["data"], "model": TINY["model"], "train": {"steps": 3}}
    found = pipeline.run(pipeline.Size(spec=spec, seeds=(0,)), say=lambda text: None)
    check(found)
    off, full = (found["sides"][side]["loss_curve"] for side in pipeline.SIDES)
    assert off[0] == pytest.approx(full[0])  # before the first update both see the same rows
    assert off[-1] != full[-1]


@pytest.mark.bench
def test_preprocess_holds_buffers_against_the_peers_before_it_times_them() -> None:
    size = preprocess.Size(
        workloads=("one-hot", "split"), shapes=((4, 4),), threads=(1,), runs=2, warmup=1, samples=512
    )
    found = preprocess.run(size, say=lambda text: None)
    assert found["equal"]
    assert {each["ms"]["theirs"]["n"] for each in found["cases"].values()} == {2}
    assert found["cases"]["split, 4 chips, 1 threads"]["minibatches"] > 1
    assert "split, 4 chips" in shown(preprocess.table(found))
