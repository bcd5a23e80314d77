"""The hosts of a run, slice by slice: what is known of each, and what is not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstep.platform.dashboard.words import age, printable
from twinstep.platform.store.records import HostHeard, Run
from twinstep.spec.machine import machine_hosts
from twinstep.spec.states import RunState
from twinstep.spec.topology import chips_of

MAX_CELLS = 512  # drawn; a slice of more hosts is told in words
SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host of a run."""

    slice: int
    host: int
    state: str
    """failed, running, silent, ended, or unknown."""
    says: str
    """What is known of it, a line for each thing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The hosts of a run."""

    title: str
    """`2 slices × 16 hosts, 4 chips each`."""
    slices: tuple[tuple[Host, ...], ...]
    note: str
    """What is not known, and why."""


def shape_of(accelerator: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return (slices, hosts of a slice, words for them)."""
    slices, hosts = machine_hosts(accelerator)
    counted = f"{hosts} host{'s' if hosts > 1 else ''}"
    match accelerator["kind"]:
        case "tpu":
            joined = f"{slices} slices of " if slices > 1 else ""
            name, chips = f"{accelerator['generation']} {accelerator['topology']}", chips_of(accelerator["topology"])
            return slices, hosts, f"{name}: {joined}{counted}, {chips // hosts} chips each"
        case "gpu":
            return slices, hosts, f"{counted}, {int(accelerator['count']) // hosts} {accelerator['model']} each"
    return slices, hosts, "this control plane's own machine: one process"


def grid(run: Run, accelerator: Mapping[str, Any], heard: Sequence[HostHeard], *, now: float) -> Grid:
    """Return the hosts of a run, as far as pods' ends and their logs tell."""
    slices, hosts, title = shape_of(accelerator)
    lines = {(each.slice, each.host): each for each in sorted(heard, key=lambda each: each.restart)}
    ends = {
        (pod.slice or 0, pod.host or 0): pod
        for pod in reversed(run.diagnosis.pods if run.diagnosis is not None else [])
        if pod.restart >= run.restarts or run.state is RunState.FAILED
    }
    if slices * hosts > MAX_CELLS:
        return Grid(title=title, slices=(), note=f"{slices * hosts:,} hosts are too many to draw")
    cells = tuple(
        tuple(
            _host(run, at, host, lines.get((at, host)), ends.get((at, host)), now=now, only=slices * hosts == 1)
            for host in range(hosts)
        )
        for at in range(slices)
    )
    known = lines or ends or slices * hosts == 1
    note = (
        "" if known else "Nothing is known of single hosts: only the first one reports, and no pod has said a line yet."
    )
    return Grid(title=title, slices=cells, note=note)


def _host(run: Run, at: int, host: int, heard: HostHeard | None, end: Any, *, now: float, only: bool) -> Host:
    says, state = [f"slice {at}, host {host}"], "unknown"
    time = heard.time if heard is not None else None
    # The run's first process is the one that reports: its heartbeat is that host's.
    if (at, host) == (0, 0) and run.heartbeat_at is not None:
        time = max(time or 0.0, run.heartbeat_at)
    if heard is not None:
        says.append(f"pod {heard.pod}" + (f", restart {heard.restart}" if heard.restart else ""))
    if time is not None:
        state = "ended" if run.is_final or (heard is not None and heard.ended) else "running"
        if state == "running" and now - time > SILENT_S:
            state = "silent"
        says.append(f"last heard {age(now - time)}" if not run.is_final else "has ended")
    if end is not None:
        code = f", exit code {end.exit_code}" if end.exit_code is not None else ""
        # Pods of a run that was cancelled end with an error, because they were told to.
        state = "ended" if run.state is RunState.CANCELLED else "failed"
        says.append(f"{end.reason or 'ended'}{code}" + (f": {end.message}" if end.message else ""))
    if heard is not None and heard.line:
        says.append(printable(heard.line))
    if len(says) == 1:
        says.append("nothing heard yet" if only or not run.is_final else "nothing was heard of it")
    return Host(slice=at, host=host, state=state, says="\n".join(says))
