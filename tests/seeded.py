"""A store filled directly, thousands of rows a second: for what must work at a thousand runs and a million points."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import insert

from twinstep.platform.store.database import Database
from twinstep.platform.store.tables import EventRow, JobRow, MetricRow, RunRow
from twinstep.spec.job import JobSpec

STATES = ("succeeded", "succeeded", "succeeded", "failed", "cancelled", "succeeded", "succeeded", "failed")
MACHINES: tuple[dict[str, Any], ...] = (
    {"kind": "cpu"},
    {"kind": "tpu", "generation": "v5p", "topology": "4x4x8"},
    {"kind": "gpu", "model": "h100", "count": 128},
)
SPAN_S = 7 * 86400


def fill_jobs(database: Database, count: int, *, prefix: str = "sweep", attempts: int = 1) -> list[str]:
    """Store `count` jobs that have ended, submitted over the last week; return their ids, the oldest first."""
    dice, now, jobs, runs = random.Random(7), time.time(), [], []
    for index in range(count):
        machine = MACHINES[index % len(MACHINES)]
        lr = round(10 ** -dice.uniform(2, 5), 6)
        spec = JobSpec.model_validate(
            {
                "name": f"{prefix}-{index:05d}",
                "accelerator": machine,
                "optimizers": {"dense": {"lr": lr}},
                "kubernetes": {"image": "registry.example/worker:1"},
            }
        )
        created = now - SPAN_S * (count - index) / count
        job_id = f"job-{index:014d}"
        jobs.append({"id": job_id, "name": spec.name, "spec": spec.model_dump(mode="json"), "created_at": created})
        for attempt in range(1, attempts + (index % 10 == 0) + 1):
            runs.append(_run(job_id, index, attempt, created, dice))
    with database.write() as connection:
        connection.execute(insert(JobRow), jobs)
        connection.execute(insert(RunRow), runs)
    return [job["id"] for job in jobs]


def _run(job_id: str, index: int, attempt: int, created: float, dice: random.Random) -> dict[str, Any]:
    took, state = dice.uniform(60, 7200), STATES[index % len(STATES)]
    summary = {
        "backend": "inductor", "steps": 400, "examples": 102_400, "examples_per_s": dice.uniform(500, 900),
        "compile_s": 8.0, "train_s": took, "eval_s": 2.0, "final_loss": dice.uniform(0.4, 0.6),
        "auc": dice.uniform(0.6, 0.78), "ne": dice.uniform(0.9, 1.0), "eval_examples": 2000,
    }  # fmt: skip
    progress = {"time": created + took, "phase": "done", "step": 400, "total_steps": 400, "examples_per_s": 700.0}
    return {
        "id": f"run-{index:011d}{attempt:03d}",
        "job_id": job_id,
        "attempt": attempt,
        "state": state,
        "reason": "its worker finished" if state == "succeeded" else f"its worker {state}",
        "version": 5,
        "created_at": created,
        "started_at": created + 3,
        "finished_at": created + took,
        "heartbeat_at": created + took,
        "acked_seq": 10,
        "progress": progress,
        "summary": summary if state == "succeeded" else None,
    }


def fill_points(
    database: Database, run_id: str, count: int, *, names: tuple[str, ...] = ("loss",), first: int = 1, seed: int = 1
) -> None:
    """Store `count` points of each metric: a curve with noise, a spike, a gap of a hundredth and some that are null."""
    dice, now = random.Random(seed), time.time()

    def rows() -> Iterator[dict[str, Any]]:
        for step in range(first, first + count):
            if count >= 1000 and 0.60 < (step - first) / count < 0.61:
                continue
            for name in names:
                value: float | None = 0.45 + 0.25 * math.exp(-4 * step / count) + dice.gauss(0, 0.01)
                if step - first == int(0.3 * count):
                    value = 5.0
                if count >= 1000 and 0 <= step - first - int(0.8 * count) < 3:
                    value = None
                yield {"run_id": run_id, "step": step, "time": now + step * 0.01, "name": name, "value": value}

    batch: list[dict[str, Any]] = []
    with database.write() as connection:
        for row in rows():
            batch.append(row)
            if len(batch) == 50_000:
                connection.execute(insert(MetricRow), batch)
                batch.clear()
        if batch:
            connection.execute(insert(MetricRow), batch)


def fill_events(database: Database, job_id: str, run_id: str, count: int) -> None:
    """Store events of a worker."""
    now = time.time()
    rows = [
        {"job_id": job_id, "run_id": run_id, "time": now + at, "name": "evaluated", "actor": "worker",
         "reason": f"step {at}", "data": {"step": at}}
        for at in range(count)
    ]  # fmt: skip
    with database.write() as connection:
        connection.execute(insert(EventRow), rows)
