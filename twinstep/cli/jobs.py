"""Commands that ask a control plane: submit, ls, get, logs, cancel. JOB is an id, the start of one, or a name."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinstep.cli.here import JsonOpt, SpecArg
from twinstep.cli.output import (
    STATE_STYLES,
    clean,
    console,
    one_line,
    plain_table,
    print_json,
    summary_table,
)
from twinstep.cli.specfile import read_spec
from twinstep.spec.states import RunState
from twinstep.spec.words import DASH, clock, duration, number

if TYPE_CHECKING:
    from twinstep.cli.client import PlaneClient


def _jobs(incomplete: str) -> list[str]:
    """Return names of jobs, or ids, that begin so, for a shell to complete; none where no control plane answers."""
    from twinstep.cli.client import PlaneClient
    from twinstep.spec.errors import TwinstepError

    try:
        with PlaneClient.of(None) as plane:
            jobs = list(islice(plane.jobs(limit=COMPLETED), COMPLETED))
    except TwinstepError:
        return []
    key = "id" if incomplete.startswith("job-") else "name"
    return sorted({str(job[key]) for job in jobs if str(job[key]).startswith(incomplete)})


COMPLETED = 100  # newest jobs that a shell completes names of
JobArg = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's id, the start of one, or its name (the newest).", autocompletion=_jobs),
]
UrlOpt = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The control plane; else TWINSTEP_URL, else the one `up` started."),
]

ProjectOpt = Annotated[
    str | None, typer.Option("--project", envvar="TWINSTEP_PROJECT", metavar="NAME", help="The project.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("submit")(submit)
    app.command("ls")(ls)
    app.command("get")(get)
    app.command("logs")(logs)
    app.command("why")(why)
    app.command("cancel")(cancel)


def submit(
    spec_path: SpecArg,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Watch the job until it ends.")] = False,
    project: ProjectOpt = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Hand a job spec to the control plane, and watch it with --follow. Its relative paths lead from here."""
    from twinstep.cli.client import PlaneClient, is_here
    from twinstep.spec.paths import with_whole_paths

    spec = read_spec(spec_path)
    with PlaneClient.of(url) as plane:
        if spec.accelerator.kind == "cpu" and is_here(plane.url, os.environ):
            spec = with_whole_paths(spec, str(Path.cwd()))
        job = plane.submit(spec.model_dump(mode="json"), project=project)
        page = f"{plane.url}/jobs/{job['id']}"
        if as_json:
            print_json({"job": job, "url": page})
        else:
            print(f"submitted {one_line(job['name'])} as {job['id']}\n{page}", flush=True)
            for warning in job.get("warnings", ()):
                print(f"warning: {one_line(warning)}", file=sys.stderr)
        if not follow:
            return 0
        from twinstep.cli.follow import follow_job

        return follow_job(plane, job["id"], as_json=as_json)


def ls(
    state: Annotated[RunState | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest first.")] = 50,
    project: ProjectOpt = None,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """List jobs, newest first."""
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        jobs = list(islice(plane.jobs(state=state.value if state else None, project=project, limit=limit), limit))
        if project is not None and not jobs:
            plane.check_project(project)
    if as_json:
        print_json({"jobs": jobs})
        return 0
    if not jobs:
        where = f" in the project {one_line(project)}" if project is not None else ""
        print(f"no {state.value + ' ' if state else ''}jobs{where}; `twinstep submit SPEC` adds one", file=sys.stderr)
        return 0
    numbers = ("step", "examples/s", "compile s", "AUC")
    table = plain_table("id", "name", "model", "backend", "state", *numbers, "age", right=numbers)
    from rich.text import Text

    for job in jobs:
        progress, summary = job.get("progress") or {}, job.get("summary") or {}
        table.add_row(
            job["id"],
            one_line(job["name"], width=40),
            model_of(job),
            one_line(job.get("backend", "")),
            Text(job["state"], style=STATE_STYLES.get(job["state"], "")),
            steps(progress),
            number(summary.get("examples_per_s", progress.get("examples_per_s")), 1),
            number(summary.get("compile_s"), 1),
            number(summary.get("auc")),
            duration(time.time() - job["created_at"]),
        )
    console().print(table)
    return 0


def get(job_ref: JobArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Show one job: state, run, progress, and the summary once it has ended."""
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        job = plane.find(job_ref)
        page = f"{plane.url}/jobs/{job['id']}"
        runs = plane.runs(job["id"])
    run: dict[str, Any] = next((each for each in runs if each["id"] == job["run_id"]), {})
    if as_json:
        print_json({"job": job, "run": run, "url": page})
        return 0
    show_job(job, run, page=page)
    return 0


def show_job(job: Mapping[str, Any], run: Mapping[str, Any], *, page: str) -> None:
    """Print a job and its newest run for people."""
    from rich.text import Text

    screen, table = console(), plain_table("", "")
    table.show_header = False
    state = Text(job["state"], style=STATE_STYLES.get(job["state"], ""))
    if job.get("reason") and job["reason"] != job["state"]:
        state.append(f"  {one_line(job['reason'])}", style="dim")
    progress = job.get("progress") or {}
    started, ended = job.get("started_at"), job.get("finished_at")
    took = None if started is None else (ended if ended is not None else time.time()) - started
    rows: list[tuple[str, Any]] = [
        ("job", job["id"]),
        ("name", one_line(job["name"])),
        ("model", model_of(job)),
        ("state", state),
        ("run", f"{job['run_id']} (attempt {job['attempt']})"),
        ("submitted", clock(job["created_at"])),
        *([("attempt since", clock(run.get("created_at")))] if job["attempt"] > 1 else []),
        ("took", duration(took)) if started is not None or ended is not None else ("waits", _waits(job)),
        ("progress", progress_line(progress, ended=ended is not None)),
        *goodput_rows(job.get("summary") or progress),
        *workload_rows(run.get("cluster") or {}),
        ("page", page),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    screen.print(table, soft_wrap=True)
    if job.get("summary"):
        screen.print()
        screen.print(summary_table(job["summary"]))


def model_of(job: Mapping[str, Any]) -> str:
    """Return what a job trains: the factory of a user's own module, else the kind; an older control plane says less."""
    return one_line(job.get("factory") or job.get("model") or DASH, width=40)


def _waits(job: Mapping[str, Any]) -> str:
    since = job.get("run_created_at", job["created_at"])  # an older control plane tells of the job alone
    return duration(time.time() - since)


def workload_rows(workload: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a run is in the cluster, and the line by which to look at it there; nothing where it is nowhere."""
    if not workload:
        return []
    kind, name, namespace = (one_line(str(workload.get(part, DASH))) for part in ("kind", "name", "namespace"))
    sent = "" if workload.get("uid") else " (being sent)"
    return [
        ("in cluster", f"{kind} {name}, namespace {namespace}{sent}"),
        ("look at it", f"kubectl -n {shlex.quote(namespace)} describe {kind.lower()} {shlex.quote(name)}"),
    ]


def goodput_rows(account: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return where a run's time went, of a summary or a progress report; nothing where it does not say."""
    seconds = {part: each for part, each in (account.get("time_s") or {}).items() if isinstance(each, int | float)}
    if not seconds or account.get("goodput") is None:
        return []
    spent = ", ".join(
        f"{one_line(part.replace('_', ' '), width=20)} {duration(seconds[part])}"
        for part in sorted(seconds, key=lambda part: -seconds[part])[:12]
        if seconds[part] >= 0.05  # seconds: less reads as nothing
    )
    says = f"{account['goodput']:.1%} of the time ({spent})"
    return [("useful steps", says), ("chip-hours", number(account.get("chip_hours")))]


def steps(progress: Mapping[str, Any]) -> str:
    """Return `120/300`, or a dash before the first report."""
    return f"{progress.get('step', 0)}/{progress.get('total_steps', 0)}" if progress else DASH


def progress_line(progress: Mapping[str, Any], *, ended: bool) -> str:
    """Return a progress report on one line; of a run that has ended, only how far it came."""
    if not progress:
        return "nothing was reported" if ended else "nothing reported yet"
    if ended and progress.get("phase") != "done":
        return f"ended at step {steps(progress)}"
    parts = [f"{one_line(str(progress.get('phase', '')), width=20)}, step {steps(progress)}"]
    if progress.get("examples_per_s") is not None:
        parts.append(f"{number(progress['examples_per_s'], 1)} examples/s")
    if progress.get("tokens_per_s"):
        parts.append(f"{number(progress['tokens_per_s'], 0)} tokens/s")
    if progress.get("eta_s") and progress.get("phase") != "done":
        parts.append(f"{duration(progress['eta_s'])} of steps left")
    return ", ".join(parts)


def logs(
    job_ref: JobArg,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    of_slice: Annotated[int | None, typer.Option("--slice", min=0, help="Only what this slice wrote.")] = None,
    host: Annotated[int | None, typer.Option("--host", min=0, help="Only what this host of its slice wrote.")] = None,
    restart: Annotated[int | None, typer.Option("--restart", min=0, help="Only of this restart; 0: the first.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Of this attempt, not the newest.")] = None,
    url: UrlOpt = None,
) -> int:
    """Print the log of a job's newest run; of several hosts, each line with its slice and host."""
    from twinstep.cli.client import PlaneClient
    from twinstep.cli.follow import Whose, left_alone, log_text

    whose = Whose(slice=of_slice, host=host, restart=restart)
    with PlaneClient.of(url) as plane:
        job = plane.find(job_ref)
        run_id = None if attempt is None else _run_of(plane, job["id"], attempt)
        follow = follow and run_id in (None, job["run_id"])  # an earlier attempt has nothing more to say
        raw = not sys.stdout.isatty()  # a file gets the bytes as they are; a terminal must not be steered by them
        with left_alone(job["id"]) if follow else contextlib.nullcontext():
            for text in log_text(plane, job["id"], follow=follow, whose=whose, run_id=run_id):
                sys.stdout.write(text if raw else clean(text))
                sys.stdout.flush()
    return 0


def _run_of(plane: PlaneClient, job_id: str, attempt: int) -> str:
    from twinstep.spec.errors import NotFoundError

    runs = plane.runs(job_id)
    found = next((run["id"] for run in runs if run["attempt"] == attempt), None)
    if found is None:
        raise NotFoundError(
            f"job {job_id} has no attempt {attempt}", remedy=f"give one of 1 to {max(run['attempt'] for run in runs)}"
        )
    return str(found)


def why(job_ref: JobArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Say why a job waits or has failed, and what to do about it."""
    from urllib.parse import quote

    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        job = plane.find(job_ref)
        found = plane.get(f"/v1/jobs/{quote(job['id'], safe='')}/explain")
    if as_json:
        print_json({"explanation": found})
        return 0
    print(one_line(found["text"]))
    for line in found["evidence"]:
        print(f"  | {one_line(line)}")
    if found["next_step"]:
        print(f"next: {one_line(found['next_step'])}")
    return 0


def cancel(job_ref: JobArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Ask for a job to stop."""
    from urllib.parse import quote

    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        job = plane.find(job_ref)
        job = plane.post(f"/v1/jobs/{quote(job['id'], safe='')}/cancel")
    if as_json:
        print_json({"job": job})
    else:
        print(f"{one_line(job['name'])} ({job['id']}) is asked to stop; it is {job['state']} now")
    return 0
