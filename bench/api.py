"""`api`: what a control plane bears, on SQLite and on PostgreSQL: submits, passes, followers, reports, charts, plans.

Each number has the bar it must reach. `equal` is false where something was lost or doubled, whatever the speed. Counts
are exact; times are of this machine while nothing else runs.

The control plane is a whole one, over HTTP on loopback; whoever asks it is a process of its own. The cluster is in
memory and answers at once, so that a pass measures the reconciler and the store.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from rich.table import Table
from sqlalchemy import insert

from bench.followers import follow
from bench.measure import Say, result
from bench.postgres import NoServerError, postgres
from bench.submits import WARM, send_rounds
from twinstep.platform.scheduler.cluster.evidence import Evidence, Object
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.cluster.reconcile import ClusterReconciler, Workers
from twinstep.platform.scheduler.render.render import render
from twinstep.platform.scheduler.validate.check import check
from twinstep.platform.server import ControlPlane, assemble, settle
from twinstep.platform.settings import Settings
from twinstep.platform.store.cluster_runs import ClusterRuns
from twinstep.platform.store.store import Store
from twinstep.platform.store.tables import JobRow, MetricRow, RunRow
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec
from twinstep.spec.states import FINAL, RunState

ROOT = Path(__file__).parents[1]
BARS = {
    "submit p95 ms": 150.0,
    "pass s": 1.0,
    "pass, all change s": 1.0,
    "ingest points/s": 20_000.0,
    "plan ms": 50.0,
    "chart first ms": 5_000.0,
    "chart again ms": 200.0,
    "follower kB": 500.0,
}
AT_LEAST = frozenset({"ingest points/s"})
SPEC_128 = "examples/clusters/tpu-v5p-4x4x8.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is run."""

    submits: int = 200
    """At one moment."""
    rounds: int = 9
    """Of them; each number is the median."""
    runs: int = 5_000
    live: int = 200
    followers: tuple[int, int] = (50, 200)
    """Of one job, at first and then."""
    batches: int = 200
    """Of 1,000 points each."""
    points: int = 1_000_000
    plans: int = 20
    databases: tuple[str, ...] = ("sqlite", "postgresql")


FULL = Size()


def run(size: Size = FULL, *, say: Say) -> dict[str, Any]:
    """Measure and return the result."""
    numbers: dict[str, dict[str, float]] = {}
    counts: dict[str, dict[str, int]] = {}
    for database in size.databases:
        try:
            with _place(database) as settings:
                say_here: Say = partial(_say_of, say, database)
                numbers[database], counts[database] = _measure(size, settings, say_here)
        except NoServerError as error:
            say(f"{database} is left out: {error}")
    say("plans")
    numbers["no database"] = {"plan ms": _plans(size)}
    lost = sum(sum(found.values()) for found in counts.values())
    return result("api", {"numbers": numbers, "bars": BARS, "wrong": counts, "equal": lost == 0}, runs=size.rounds)


def _say_of(say: Say, database: str, text: str) -> None:
    say(f"{database}: {text}")


def _measure(size: Size, settings: Settings, say: Say) -> tuple[dict[str, float], dict[str, int]]:
    numbers: dict[str, float] = {}
    wrong: dict[str, int] = {}
    with _running(settings) as plane:
        for name, part in (("submits", _submits), ("ingest", _ingest), ("followers", _followers)):
            say(name)
            found, bad = part(size, plane)
            numbers |= found
            wrong |= bad
    with contextlib.closing(Store(settings.database)) as store:
        for name, look in (("a pass", _pass), ("charts", _charts)):
            say(name)
            numbers |= look(size, store)
    return numbers, wrong


# ---- places ----


@contextlib.contextmanager
def _place(database: str) -> Iterator[Settings]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinstep-bench-")))
        url = None
        if database == "postgresql":
            # As a server is set up for data that must last.
            url = stack.enter_context(postgres(fsync="on", synchronous_commit="on", full_page_writes="on")).url()
        yield Settings(data_dir=directory / "data", database_url=url, port=0, worker_command=("false",))


@contextlib.contextmanager
def _running(settings: Settings) -> Iterator[ControlPlane]:
    """A control plane that answers; nothing looks after its runs, so that each number is of one thing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plane = assemble(replace(settings, port=listener.getsockname()[1]), pages=False)
        server = uvicorn.Server(uvicorn.Config(plane.app, log_config=None, access_log=False, proxy_headers=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        settle()
        try:
            yield plane
        finally:
            plane.service.closing.set()
            server.should_exit = True
            thread.join()
            plane.close()


# ---- parts ----

Part = tuple[dict[str, float], dict[str, int]]


def _submits(size: Size, plane: ControlPlane) -> Part:
    """So many submits at one moment, again and again, each with a key and each sent twice: none lost, none doubled."""
    rounds, stored = _elsewhere(send_rounds, plane.settings.url, size.submits, size.rounds)
    jobs = {job for each in rounds for job in each.jobs}
    wanted = size.submits * size.rounds
    doubled = sum(one != other for each in rounds for one, other in zip(each.jobs, each.again, strict=True))
    p95s = [sorted(each.seconds)[int(0.95 * (size.submits - 1))] for each in rounds]
    return (
        {
            "submit p50 ms": 1000 * statistics.median(statistics.median(each.seconds) for each in rounds),
            "submit p95 ms": 1000 * statistics.median(p95s),
            "submit p95 worst ms": 1000 * max(p95s),
        },
        {"submits lost": wanted - len(jobs & set(stored)), "submits doubled": doubled + len(stored) - WARM - len(jobs)},
    )


def _at_once(count: int, work: Callable[[int], str], *, workers: int = 16) -> tuple[list[float], list[str]]:
    """Do work so many times, many at once; return how long each took, and what each returned."""

    def timed(number: int) -> tuple[float, str]:
        started = time.perf_counter()
        found = work(number)
        return time.perf_counter() - started, found

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(timed, range(count)))
    return [took for took, _ in done], [found for _, found in done]


def _started(plane: ControlPlane, name: str) -> tuple[str, str]:
    """Return job and run of a job that is starting, with the token `secret`."""
    from twinstep.platform.scheduler.rundir import hash_token

    job = plane.store.create_job(JobSpec(name=name))
    for version, to in ((1, RunState.QUEUED), (2, RunState.STARTING)):
        plane.store.move(
            job.run_id, to=to, if_version=version, reason="", actor="scheduler", token_hash=hash_token("secret")
        )
    return job.id, job.run_id


def _ingest(size: Size, plane: ControlPlane) -> Part:
    """Reports of four runs at once, each batch sent twice, over HTTP with their tokens."""
    runs = [_started(plane, f"ingest-{number}")[1] for number in range(4)]
    seconds, sent = _elsewhere(_send_reports, plane.settings.url, runs, size.batches)
    with plane.store.database.read() as connection:
        from sqlalchemy import func, select

        stored = connection.execute(
            select(func.count()).select_from(MetricRow).where(MetricRow.run_id.in_(runs))
        ).scalar_one()
    return {"ingest points/s": sent / seconds}, {"points lost or doubled": abs(sent - stored)}


def _send_reports(url: str, runs: list[str], batches: int) -> tuple[float, int]:
    """Send each run its part of the batches, every tenth twice; return the seconds and the points sent."""
    rows, each = 100, batches // len(runs)
    values = dict.fromkeys((f"m{number}" for number in range(10)), 0.5)
    bodies = [
        json.dumps(
            {
                "records": [
                    {"kind": "metric", "seq": at + 1, "time": 1.0, "step": at, "values": values}
                    for at in range(batch * rows, (batch + 1) * rows)
                ]
            }
        )
        for batch in range(each)
    ]
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    with httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers) as http:

        def send(number: int) -> str:
            for batch, body in enumerate(bodies):
                for _ in range(2 if batch % 10 == 0 else 1):  # an answer that was lost on its way
                    http.post(f"/v1/runs/{runs[number]}/reports", content=body).raise_for_status()
            return runs[number]

        started = time.perf_counter()
        _at_once(len(runs), send, workers=len(runs))
        return time.perf_counter() - started, len(runs) * each * rows * len(values)


def _followers(size: Size, plane: ControlPlane) -> Part:
    """Few, then many follow a job while it reports; each must see every point. What one costs is the slope between
    the two, of a process that has served as many as the few before: threads and connections are made once.
    """
    few, many = size.followers
    numbers: dict[str, float] = {}
    unseen, resident = 0, {}
    for name, count in (("warm", few), ("few", few), ("many", many)):
        job_id, run_id = _started(plane, f"followed-{name}")
        url = f"{plane.settings.url}/v1/jobs/{job_id}/stream"
        found = follow(url, count, partial(plane.store.ingest, run_id))
        resident[name], numbers["followers s"] = found.resident_kb, found.seconds
        unseen += found.unseen
    numbers["follower kB"] = max(0.0, (resident["many"] - resident["few"]) / (many - few))
    return numbers, {"points not seen": unseen}


def _elsewhere(work: Callable[..., Any], *args: Any) -> Any:
    """Do work in a process of its own: whoever asks takes no turn from the control plane that answers."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


class _Cluster:
    """A cluster in memory: what was applied runs, and answers at once."""

    def __init__(self) -> None:
        self._there: dict[str, Object] = {}

    def apply(self, run_id: str, objects: Sequence[Object], *, token: str | None = None) -> WorkloadRef:
        workload = dict(objects[-1])
        meta = workload["metadata"]
        jobs = workload["spec"].get("replicatedJobs", ())
        workload["metadata"] = {**meta, "uid": f"uid-{run_id}", "generation": 1}
        workload["status"] = {
            "replicatedJobsStatus": [
                {"name": job["name"], "ready": job.get("replicas", 1), "succeeded": 0} for job in jobs
            ]
        }
        workload["spec"] = {**workload["spec"], "suspend": False}
        self._there[run_id] = workload
        return WorkloadRef(kind=workload["kind"], namespace=meta["namespace"], name=meta["name"], uid=f"uid-{run_id}")

    def end_all(self) -> None:
        """Let everything that was applied come to its end."""
        ended = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for run_id, workload in self._there.items():
            status = {**workload["status"], "terminalState": "Completed", "conditions": [ended]}
            self._there[run_id] = {**workload, "status": status}

    def put_back(self, run_id: str, ref: WorkloadRef, objects: Sequence[Object]) -> list[str]:
        return []

    def workloads(self) -> dict[str, WorkloadRef]:
        return {}

    def look(self, run_id: str, ref: WorkloadRef) -> Evidence | None:
        return Evidence(workload=self._there.get(run_id), now=time.time())

    def confirm(self, run_id: str, ref: WorkloadRef) -> Evidence:
        return Evidence(workload=self._there.get(run_id), now=time.time())

    def suspend(self, run_id: str, ref: WorkloadRef, suspended: bool) -> None:
        pass

    def delete(self, run_id: str, ref: WorkloadRef) -> bool:
        return False

    def age(self) -> float | None:
        return 0.0


def _pass(size: Size, store: Store) -> dict[str, float]:
    """A pass of the reconciler over many runs, some of them live: the worst of several, and one in which all end."""
    spec = parse_spec((ROOT / SPEC_128).read_bytes())
    body = spec.model_dump(mode="json")
    _many_runs(size, store, body)
    runs = ClusterRuns(store.database, changed=store.changes.bump)
    cluster = _Cluster()
    reconciler = ClusterReconciler(
        runs, cluster, workers=Workers(image="example.org/worker:1"), every_seconds=1.0
    )  # fmt: skip
    launched = time.perf_counter()
    for _ in range(100):
        reconciler.run_once()
        if all(run.state is RunState.RUNNING for run in runs.live()):
            break
    launched = time.perf_counter() - launched
    assert len(runs.live()) == size.live
    took = []
    for _ in range(10):
        started = time.perf_counter()
        reconciler.run_once()
        took.append(time.perf_counter() - started)
    cluster.end_all()
    started = time.perf_counter()
    reconciler.run_once()
    changed = time.perf_counter() - started
    assert not runs.live()
    return {"launch all s": launched, "pass s": max(took), "pass, all change s": changed}


def _many_runs(size: Size, store: Store, spec: dict[str, Any]) -> None:
    now = time.time()
    final = sorted(FINAL)
    states = [RunState.PENDING if number < size.live else final[number % 3] for number in range(size.runs)]
    jobs = [
        {"id": f"job-zz{number:06}", "name": f"n{number}", "spec": spec, "created_at": now, "project": "default",
         "submitted_by": "user"}
        for number in range(size.runs)
    ]  # fmt: skip
    rows = [
        {"id": f"run-zz{number:06}", "job_id": f"job-zz{number:06}", "attempt": 1, "state": state, "reason": "",
         "version": 1, "created_at": now, "acked_seq": 0, "backend": "kubernetes", "restarts": 0, "active_seconds": 0.0}
        for number, state in enumerate(states)
    ]  # fmt: skip
    with store.database.write() as connection:
        for begin in range(0, size.runs, 500):
            connection.execute(insert(JobRow), jobs[begin : begin + 500])
            connection.execute(insert(RunRow), rows[begin : begin + 500])


def _charts(size: Size, store: Store) -> dict[str, float]:
    """The dashboard's question over a run of very many points: at first, and once more."""
    run_id = "run-zz000000"
    names = [f"m{number}" for number in range(10)]
    each = size.points // len(names)
    with store.database.write() as connection:
        for begin in range(0, each, 2_000):
            connection.execute(
                insert(MetricRow),
                [
                    {"run_id": run_id, "step": step, "time": 0.0, "name": name, "value": step % 97 / 97}
                    for step in range(begin, min(begin + 2_000, each))
                    for name in names
                ],
            )
    took = []
    for _ in range(4):
        started = time.perf_counter()
        store.series.series(run_id, names[:4], max_points=500)
        took.append(time.perf_counter() - started)
    return {"chart first ms": 1000 * took[0], "chart again ms": 1000 * max(took[1:])}


def _plans(size: Size) -> float:
    """Render and check a job of 128 chips, as `POST /v1/jobs:plan` does; the median, warm."""
    spec = parse_spec((ROOT / SPEC_128).read_bytes())
    took = []
    for _ in range(size.plans + 3):
        started = time.perf_counter()
        check(render(spec, default_image="example.org/worker:1").objects)
        took.append(time.perf_counter() - started)
    return 1000 * statistics.median(took[3:])


def table(found: dict[str, Any]) -> Table:
    """Return the result as a table: each number beside its bar."""
    page = Table(title="what a control plane bears", title_justify="left")
    for name in ("number", *found["numbers"]):
        page.add_column(name, justify="left" if name == "number" else "right")
    page.add_column("bar", justify="right")
    names = list(dict.fromkeys(name for numbers in found["numbers"].values() for name in numbers))
    for name in names:
        bar = found["bars"].get(name)
        cells = [_cell(numbers.get(name), bar, at_least=name in AT_LEAST) for numbers in found["numbers"].values()]
        page.add_row(name, *cells, "" if bar is None else f"{'≥' if name in AT_LEAST else '≤'} {bar:,g}")
    for name in dict.fromkeys(name for wrong in found["wrong"].values() for name in wrong):
        page.add_row(name, *(str(found["wrong"].get(each, {}).get(name, "")) for each in found["numbers"]), "0")
    return page


def _cell(value: float | None, bar: float | None, *, at_least: bool) -> str:
    if value is None:
        return ""
    missed = bar is not None and (value < bar if at_least else value > bar)
    return f"{value:,.4g}" + (" missed" if missed else "")
