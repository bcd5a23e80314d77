"""Tell processes apart for certain: a pid alone is soon somebody else's. Linux, standard library only.

A process is known by pid, start time in clock ticks since boot, and the id of that boot. The control plane and the
supervisor both use this; neither signals a process whose three do not match.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUN_MARK = "TWINSTEP_RUN_ID"  # in the environment of a worker and all it starts


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for certain."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has `pid` now; None where there is none, or only its remains."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, boot_id())

    @classmethod
    def from_json(cls, data: Any) -> Process | None:
        """Return what `to_json` gave, or None where that is not what this is."""
        try:
            return cls(int(data["pid"]), int(data["start_ticks"]), str(data["boot_id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def alive(self) -> bool:
        """Say whether this very process still runs."""
        return Process.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this very process; False where it is gone. A pidfd keeps the pid from changing hands."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(fd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)


def boot_id() -> str:
    """Return an id that changes with every boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def kill_group_of_run(group: int, run_id: str) -> int:
    """Kill every process of a group that carries the run's mark in its environment; return how many there were.

    For a group whose leader is gone: the number may belong to others by now, so each member must show the mark.
    """
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or _stat(int(entry.name), field=2) != str(group):
            continue
        process = Process.of(int(entry.name))
        if process is not None and _carries_mark(process.pid, run_id) and process.send(signal.SIGKILL):
            killed += 1
    return killed


def _carries_mark(pid: int, run_id: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{RUN_MARK}={run_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _start_ticks(pid: int) -> int | None:
    state, ticks = _stat(pid, field=0), _stat(pid, field=19)
    return None if state is None or ticks is None or state in "ZX" else int(ticks)


def _stat(pid: int, *, field: int) -> str | None:
    """Return a field of /proc/PID/stat, counted from the state (0); pgrp is 2, starttime 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return fields[field] if len(fields) > field else None
