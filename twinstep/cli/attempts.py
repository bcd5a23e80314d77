"""Commands that ask something of a job that is there: retry, suspend, resume, resize."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from twinstep.cli.here import JsonOpt
from twinstep.cli.jobs import JobArg, UrlOpt
from twinstep.cli.output import one_line, print_json

FollowOpt = Annotated[bool, typer.Option("--follow", "-f", help="Watch the job until it ends.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (retry, suspend, resume, resize):
        app.command(command.__name__)(command)


def retry(job_ref: JobArg, follow: FollowOpt = False, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Run a job that failed or was cancelled again, from its last checkpoint."""
    return _ask("retry", job_ref, as_json=as_json, url=url, follow=follow)


def suspend(job_ref: JobArg, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Give a job's nodes back until it is resumed."""
    return _ask("suspend", job_ref, as_json=as_json, url=url)


def resume(job_ref: JobArg, follow: FollowOpt = False, as_json: JsonOpt = False, url: UrlOpt = None) -> int:
    """Let a suspended job go on; or one that failed or was cancelled, by a new run that goes on from it."""
    return _ask("resume", job_ref, as_json=as_json, url=url, follow=follow)


def resize(
    job_ref: JobArg,
    topology: Annotated[str | None, typer.Option("--topology", help="Of a TPU slice: 2x2x2.")] = None,
    slices: Annotated[int | None, typer.Option("--slices", min=1, help="TPU slices.")] = None,
    chips_per_host: Annotated[int | None, typer.Option("--chips-per-host", help="Chips of one TPU host.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs in all.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Devices of a CPU job.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Samples per step.")] = None,
    follow: FollowOpt = False,
    as_json: JsonOpt = False,
    url: UrlOpt = None,
) -> int:
    """Run a job on another number of chips or devices, once the run it has now has stopped."""
    size = {
        "topology": topology,
        "slices": slices,
        "chips_per_host": chips_per_host,
        "gpus": gpus,
        "devices": devices,
        "batch_size": batch_size,
    }
    told = {name: value for name, value in size.items() if value is not None}
    return _ask("resize", job_ref, body=told, as_json=as_json, url=url, follow=follow)


def _ask(verb: str, job_ref: str, *, body: Any = None, as_json: bool, url: str | None, follow: bool = False) -> int:
    from twinstep.cli.client import PlaneClient

    with PlaneClient.of(url) as plane:
        job = plane.find(job_ref)
        job = plane.post_once(f"/v1/jobs/{quote(job['id'], safe='')}/{verb}", body)
        if as_json:
            print_json({"job": job})
        else:
            said = f"attempt {job['attempt']} is {job['state']}: {one_line(job['reason'])}"
            if verb == "suspend" and job["state"] in ("starting", "running", "restarting"):  # the answer is the wish's
                said = f"attempt {job['attempt']} is asked to give its nodes back; it is {job['state']} now"
            print(f"{one_line(job['name'])} ({job['id']}), {said}", flush=True)
        if not follow:
            return 0
        from twinstep.cli.follow import follow_job

        return follow_job(plane, job["id"], as_json=as_json)
