"""The entrypoint of a RayJob: Ray Train's TorchTrainer over the worker group, one rank per GPU.

`python -m twinstep.worker.train.ray_job`, as Ray's Jobs API starts it on the head. The spec is the file that
TWINSTEP_SPEC names, the number of ranks is TWINSTEP_PROCESSES, both set by what renders the pods. Exit codes are those
of `twinstep train`: 0; 75 after SIGTERM or where the head's node drains, state saved; the first failing rank's, with
its last words. Another node that drains ends no job: see `train`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from twinstep.spec.errors import SpecError, TwinstepError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import parse_spec
from twinstep.spec.words import EXIT_FAILED, EXIT_PREEMPTED, EXIT_SPEC
from twinstep.worker.train.ray_board import Board, outcome

LOG = logging.getLogger(__name__)

SPEC, PROCESSES = "TWINSTEP_SPEC", "TWINSTEP_PROCESSES"
START_SECONDS = 600  # that a worker group has to start: images are pulled by then, but torch comes off a slow disk
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_SECONDS),
}
"""What Ray reads when it is imported, where nobody has set it."""
LOOK, LOOK_AT_NODES = 0.25, 1.0  # seconds between looks whether a stop was asked for, and whether a node is to go


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the environment asks for."""

    spec: JobSpec
    processes: int

    @classmethod
    def from_environment(cls) -> Asked:
        """Return the spec and the number of ranks.

        Raises:
            UnavailableError: a variable is missing or no number, or the file cannot be read.
            SpecError: the spec is not valid, or asks for another number of GPUs.
        """
        path = os.environ.get(SPEC, "")
        if not path:
            raise UnavailableError(f"{SPEC} is not set", remedy=f"set {SPEC} to the path of the job spec")
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UnavailableError(
                f"the job spec {path} cannot be read: {error.strerror}", remedy=f"set {SPEC} to its path"
            ) from error
        spec = parse_spec(text, source=path)
        count = spec.accelerator.count if spec.accelerator.kind == "gpu" else None
        said = os.environ.get(PROCESSES) or str(count or spec.runtime.processes)
        if not said.isdecimal() or int(said) < 1:
            raise UnavailableError(f"{PROCESSES} is {said!r}", remedy="set it to the number of ranks, 1 or more")
        if count is not None and int(said) != count:
            raise SpecError(
                f"{PROCESSES} is {said}, but the spec asks for {count} GPUs, and each is a rank",
                remedy=f"{PROCESSES}={count}, or accelerator.count: {said}",
            )
        return cls(spec=spec, processes=int(said))


def train(asked: Asked, *, ends_process: bool = False) -> tuple[int, str]:
    """Run the ranks to their end; return the exit code and, where they failed, why.

    Where a worker's node is taken away, ranks save and leave, and others start once the cluster has room for all again:
    KubeRay, which would count the end of this process as a failure, hears of none. The head's own node, and a wish to
    stop, end the job.

    Args:
        ends_process: this process ends then, with an exit code that SIGTERM is not to change any more.
    """
    with (
        _handler_kept(ends_process=ends_process),
        _connected(),
        tempfile.TemporaryDirectory(prefix="twinstep-ray-") as folder,
    ):
        stop = _listen()
        begun, count, told = time.monotonic(), 0, ""
        while True:
            code, why, node_went, step = _attempt(asked, stop, storage=f"{folder}/{count}", told=told)
            if code != EXIT_PREEMPTED or not node_went or not _room_again(asked, stop):
                return code, why
            count += 1
            LOG.warning("a node was taken away; ranks saved what they had, and start again for the %d. time", count)
            reason = "the node of a rank was taken away"
            seconds = round(time.monotonic() - begun, 3)
            told = json.dumps({"count": count, "reason": reason, "step": step, "seconds": seconds})


def _attempt(asked: Asked, stop: threading.Event, *, storage: str, told: str) -> tuple[int, str, bool, int | None]:
    """Run a group of ranks.

    Returns:
        The exit code; why it failed; whether a worker's node that is to go ended it; steps that are known to be done.

    Args:
        told: what a supervisor would tell a worker of the one before it; empty for the first.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from twinstep.worker.train.ray_backend import rank_config
    from twinstep.worker.train.ray_rank import run_rank

    # On the head, like the driver: it outlives any worker's node.
    here = ray.get_runtime_context().get_node_id()
    board: Any = ray.remote(num_cpus=0, label_selector={"ray.io/node-id": here})(Board).remote()
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"spec": asked.spec.model_dump_json(), "board": board, "restart": told},
        torch_config=rank_config(),
        scaling_config=ScalingConfig(
            num_workers=asked.processes, use_gpu=asked.spec.accelerator.kind == "gpu", placement_strategy="PACK"
        ),
        # Nothing is kept there: checkpoints are the worker's own. Ray Train itself starts nothing again.
        run_config=RunConfig(name="run", storage_path=storage),
    )
    said, going = _fit(trainer, board, stop)
    ends, gone, step = ray.get([board.ends.remote(), board.on.remote(going), board.step.remote()])
    code, why = outcome(ends, asked.processes, ray_said=said, gone=gone)
    return code, why, bool(going) and not stop.is_set(), step


def _room_again(asked: Asked, stop: threading.Event) -> bool:
    """Wait until nodes that stay have room for all ranks; False where the job is to stop, or the head's node is to go.

    How long that may take is for `runtime.max_seconds` to say: the control plane ends it then, or a deadline by hand.
    """
    while not stop.wait(LOOK_AT_NODES):
        going = _going()
        if _here() in going:
            return False
        if _fits(asked, going):
            return True
    return False


def _fits(asked: Asked, going: set[str]) -> bool:
    import ray

    kind = "GPU" if asked.spec.accelerator.kind == "gpu" else "CPU"
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [each for each in known if each["Alive"] and each["NodeID"] not in going]
    return sum(int(each["Resources"].get(kind, 0)) for each in nodes) >= asked.processes


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    import ray

    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError as error:
        raise UnavailableError(
            "there is no Ray cluster here", remedy="ray start --head, then submit this with ray job submit"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _handler_kept(*, ends_process: bool) -> Iterator[None]:
    """Give SIGTERM back to whoever had it, once Ray is left: leaving it takes a while, in which another may come."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if ends_process else before)


def _listen() -> threading.Event:
    """Return an event that SIGTERM sets from now on; Ray's own handler, set by connecting, would end the driver."""
    event = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        event.set()

    signal.signal(signal.SIGTERM, on_signal)
    return event


def _fit(trainer: Any, board: Any, stop: threading.Event) -> tuple[str, set[str]]:
    """Run a trainer in a thread of its own, so that this one hears signals.

    Returns:
        What it raised, in words, and the nodes of ranks that are to go, for which ranks were asked to leave.
    """
    raised: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # all that Ray raises; the board knows which rank was first
            raised.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    asked, going, looked = False, set[str](), 0.0
    while thread.is_alive():
        thread.join(LOOK)
        if asked:
            continue
        if time.monotonic() - looked > LOOK_AT_NODES:
            looked = time.monotonic()
            going = _going_of(board)
            if _here() in going:
                stop.set()
        if stop.is_set() or going:
            asked = True
            board.ask.remote()
    return "".join(str(error) for error in raised), going


def _here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _going_of(board: Any) -> set[str]:
    """Return which nodes of ranks, and this one, are to go: their pods were told to, and Ray gives them time."""
    going = _going()
    if not going:
        return going
    import ray

    try:
        return going & {_here(), *ray.get(board.nodes.remote())}
    except Exception as error:  # as in `_going`
        _say_once(f"on which nodes ranks run cannot be seen: {type(error).__name__}: {error}")
        return set()


def _going() -> set[str]:
    """Return the nodes that are to go.

    Ray Train's own `get_preemption_info` is a collective call, for loops whose ranks are in step. Where Ray does not
    answer, a run does not end for it: its pods are told by SIGTERM as well.
    """
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except Exception as error:  # a private door of Ray's, which may be another one in the next version
        _say_once(f"whether a node is to go cannot be seen: {type(error).__name__}: {error}")
        return set()


@functools.cache
def _say_once(text: str) -> None:
    LOG.warning("%s", text)


def main(*, ends_process: bool = False) -> int:
    """Run the job that the environment asks for; return the exit code.

    Args:
        ends_process: as in `train`.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        code, why = train(Asked.from_environment(), ends_process=ends_process)
    except TwinstepError as error:
        print(f"{error.problem}\nfix: {error.remedy}", file=sys.stderr, flush=True)
        return EXIT_SPEC if isinstance(error, SpecError) else EXIT_FAILED
    if why:
        print(f"the run failed: {why}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(ends_process=True))
