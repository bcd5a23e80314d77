"""One rank of a run under Ray: what Ray Train calls in each worker of the group.

A rank is a process of its own, started with the same command as on every other backend, `twinstep train -`, its spec on
standard input. So torch and jax find the environment they need before they are loaded, SIGTERM reaches the main thread,
a crash of native code is an exit code, and the loop needs to know nothing of Ray. The worker around it waits, passes
on a wish to stop, and says how it ended.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from twinstep.worker.train.environment import RESTART
from twinstep.worker.train.heartbeat import last_step
from twinstep.worker.train.launch import end_with_parent
from twinstep.worker.train.ranks import Ranks
from twinstep.worker.train.ray_board import Ended

POLL = 0.25  # seconds between looks at the child and at the board
PEER_PATIENCE = 15.0  # seconds that a rank has to end by itself once another failed
LAST_WORDS = 5.0  # seconds that the others have to say so
LAST_LINES, LAST_CHARACTERS = 12, 2000
RUN_DIR = "TWINSTEP_RUN_DIR"
REPORTING = ("TWINSTEP_RUN_ID", RUN_DIR, "TWINSTEP_API_URL", "TWINSTEP_RUN_TOKEN")


class RankFailed(Exception):
    """A rank's process failed; Ray Train then ends the group."""


def rank_environment(base: Mapping[str, str], ranks: Ranks, *, processors: int) -> dict[str, str]:
    """Return the environment of a rank's process.

    Reports are rank 0's alone: the others are by hand, as far as a control plane can see. Threads are shared out among
    the ranks of a host; Ray's own setting is one for each.
    """
    kept = {name: value for name, value in base.items() if ranks.first or name not in REPORTING}
    return {**kept, **ranks.as_environment(), "OMP_NUM_THREADS": str(max(1, processors // ranks.on_host))}


def run_rank(config: dict[str, Any]) -> None:
    """Run one rank to its end; called by Ray Train with the spec's text and the board.

    Raises:
        RankFailed: its process failed, with its last words.
    """
    import ray
    import ray.train

    context, board = ray.train.get_context(), config["board"]
    ranks = Ranks(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local=context.get_local_rank(),
        on_host=context.get_local_world_size(),
        address=os.environ["MASTER_ADDR"],  # `ray_backend.py` has set both
        port=int(os.environ["MASTER_PORT"]),
    )
    rank, processors = ranks.rank, len(os.sched_getaffinity(0))
    environment = rank_environment(os.environ, ranks, processors=processors)
    if config.get("restart"):
        environment[RESTART] = config["restart"]
    board.stand.remote(rank, ray.get_runtime_context().get_node_id())
    child = _start(config["spec"], environment)
    tail: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    readers = [_reader(child.stdout, sys.stdout, None, shown=rank == 0), _reader(child.stderr, sys.stderr, tail)]
    try:
        _wait(child, board, Path(environment[RUN_DIR]) if ranks.first and environment.get(RUN_DIR) else None)
    finally:
        if child.poll() is None:
            child.kill()
        code = child.wait()
        for reader in readers:
            reader.join(timeout=5.0)
    ended = Ended(rank=rank, code=code if code >= 0 else 128 - code, words="".join(tail)[-LAST_CHARACTERS:])
    ray.get(board.end.remote(ended))
    if ended.failed:
        _let_others_end(board, ranks.size)
        raise RankFailed(f"rank {rank} ended with exit code {ended.code}: {ended.words.strip()}")


def _start(spec: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "twinstep", "train", "-"],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=end_with_parent,  # Ray kills its workers, which then could not end their ranks
    )
    assert child.stdin is not None  # noqa: S101
    try:
        child.stdin.write(spec)
        child.stdin.close()
    except BrokenPipeError:  # it ended at once; how, is told as any end is
        pass
    return child


def _wait(child: subprocess.Popen[str], board: Any, run_dir: Path | None) -> None:
    """Wait for a rank's process; pass on a wish to stop once, and end it where another rank has failed.

    Args:
        run_dir: where it says how many steps are done, which is passed on.
    """
    import ray

    asked, until, told = False, None, None
    while child.poll() is None:
        time.sleep(POLL)
        step = last_step(run_dir)  # of a child that has ended, too
        if step not in (None, told):
            board.done.remote(step)
            told = step
        stop, failed = ray.get(board.orders.remote())
        if stop and not asked:
            asked = True
            child.terminate()
        if failed and until is None:
            until = time.monotonic() + PEER_PATIENCE
        if until is not None and time.monotonic() > until:
            child.kill()


def _let_others_end(board: Any, world: int) -> None:
    """Wait until the other ranks have ended: Ray Train kills the group as soon as it hears of a failure."""
    import ray

    until = time.monotonic() + PEER_PATIENCE + LAST_WORDS
    while time.monotonic() < until and len(ray.get(board.ends.remote())) < world:
        time.sleep(POLL)


def _reader(
    stream: IO[str] | None, to: IO[str], tail: collections.deque[str] | None, *, shown: bool = True
) -> threading.Thread:
    """Start a thread that passes a child's lines on and keeps the last ones."""

    def pass_on() -> None:
        for line in stream or ():
            if tail is not None:
                tail.append(line)
            if shown:
                to.write(line)
                to.flush()

    thread = threading.Thread(target=pass_on, name="rank-output", daemon=True)
    thread.start()
    return thread
