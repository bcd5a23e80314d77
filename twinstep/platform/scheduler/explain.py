"""Why a job is not running, or why it failed: one paragraph with the next step. Pure: facts in, words out.

A log's last lines are matched against signatures, the most telling first; what no signature knows is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.platform.scheduler.cluster.causes import failed as pods_failed
from twinstep.platform.scheduler.cluster.causes import waiting as cluster_waits
from twinstep.platform.scheduler.cluster.diagnose import words_of
from twinstep.platform.scheduler.decide import NEEDS_MODULES
from twinstep.platform.store.records import Diagnosis, Event, JobDetail, View
from twinstep.spec.states import RunState
from twinstep.spec.words import duration

SILENT_S = 60.0  # a worker that reports every second or two and was not heard of for so long is stuck, or cut off
LONG_WAIT_S = 600.0  # a wait that is told of
MAX_EVIDENCE = 300  # characters of a line that is shown


class Explanation(View):
    """Why a job is where it is."""

    state: RunState
    cause: str
    """The cause's name, for programs: out_of_memory, waits_for_others, …"""
    text: str
    """One paragraph: what happened."""
    next_step: str
    """What to do about it; empty where nothing is to be done."""
    evidence: list[str]
    """Lines of the log or of events that say so, oldest first."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a line of a log means."""

    cause: str
    pattern: str
    """A regular expression, looked for within a line."""
    text: str
    next_step: str


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "accelerator_memory",
        r"RESOURCE_EXHAUSTED|CUDA out of memory|Ran out of memory in memory space (hbm|vmem|sparsecore)",
        "the accelerator's memory did not hold the step",
        "lower data.batch_size or data.uih_len, use a larger slice, or let the compiler recompute (rematerialise)",
    ),
    Signature(
        "host_memory",
        r"MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|oom-kill|OOMKilled",
        "the host's memory did not suffice",
        "lower data.rows, model.embedding_dim or data.batch_size, or raise kubernetes.memory_gib",
    ),
    Signature(
        "disk_full",
        r"No space left on device|Disk quota exceeded|ENOSPC",
        "a disk was full",
        "make room on it, or set compile.cache_dir to one with room; then submit again",
    ),
    Signature(
        "loss_not_finite",
        r"the loss of step [\d,]+ is (nan|inf|-inf)",
        "the loss was not finite",
        "lower optimizers.dense.lr, or set train.clip_norm",
    ),
    Signature(
        "peer_lost",
        r"NCCL (error|WARN)|ncclSystemError|ncclRemoteError|ProcessGroupNCCL.*(timeout|watchdog)|"
        r"Connection (closed|reset) by peer.*gloo|gloo.*Connection (closed|reset) by peer",
        "a process lost its peers: another one died first, or the network between them failed",
        "look at the process that failed first; the others only report that it is gone",
    ),
    Signature(
        "coordinator_lost",
        r"coordination service|DEADLINE_EXCEEDED.*(barrier|Barrier|RegisterTask)|Failed to connect to coordinator",
        "a process did not reach the coordinator, the first process of the run",
        "see whether all pods start within the time allowed (image pulls), and whether the first one runs",
    ),
    Signature(
        "tpu_busy",
        r"multi-process lockfile|TPU is already in use|The TPU is already in use",
        "another process of the host holds the TPU",
        "end it; a host's TPU belongs to one process",
    ),
    Signature(
        "tpu_missing",
        r"No TPU devices? (were |was )?found|Unable to initialize backend 'tpu'|TPU initialization failed",
        "no TPU was found on the host",
        "see that the node has the accelerator that the spec asks for, and that libtpu fits it",
    ),
    Signature(
        "image",
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|manifest unknown",
        "the worker's image could not be pulled",
        "check kubernetes.image and the node's right to pull it",
    ),
    Signature(
        "compiler_missing",
        r"needs a C\+\+ compiler|g\+\+: (not found|No such file)|InvalidCxxCompiler",
        "there is no C++ compiler for Inductor",
        "install g++, name one in CXX, or set compile.backend: xla",
    ),
    Signature(
        "crash",
        r"Segmentation fault|SIGSEGV|core dumped|Fatal Python error",
        "a library crashed",
        "try compile.backend: eager to see whether the step itself is at fault, and report the log",
    ),
)
"""The most telling first: a process that lost its peers is told of after what may have killed them."""


def goes_on_from(saved: int | None) -> str:
    """Return from where a further run of a job goes on, whose newest checkpoint is of the step `saved`, in words."""
    return "from the beginning: it has saved no checkpoint" if saved is None else f"from its checkpoint of step {saved}"


def explain(
    job: JobDetail,
    *,
    saved: int | None = None,
    events: Sequence[Event] = (),
    log: Sequence[str] = (),
    diagnosis: Diagnosis | None = None,
    now: float | None = None,
) -> Explanation:
    """Return why a job is where it is.

    Args:
        saved: the step of the newest checkpoint that it has told of; None: it has told of none.
        events: the newest ones of its newest run, oldest first.
        log: the last lines of that run's log, oldest first.
        diagnosis: what its cluster says of that run.
        now: Unix seconds; None where silence is not to be judged.
    """
    if job.state is RunState.SUCCEEDED:
        took = duration((job.finished_at or 0.0) - (job.started_at or job.run_created_at))
        return _said(job, "succeeded", f"the job succeeded after {took}", "")
    if job.state is RunState.CANCELLED:
        why = "" if job.reason in ("", "cancelled") else f": {job.reason}"
        return _said(
            job,
            "cancelled",
            f"the job was cancelled{why}",
            f"twinstep retry {job.id} runs it again, {goes_on_from(saved)}",
        )
    if job.state is RunState.FAILED:
        failure = _failure(job, events, log, diagnosis)
        again = "" if saved is None else f" Tried again (twinstep retry {job.id}), it goes on {goes_on_from(saved)}."
        return failure.model_copy(update={"text": failure.text + again})
    if job.reason.startswith("is tried again: "):
        trouble = job.reason.removeprefix("is tried again: ")
        return _said(job, "trouble", f"the scheduler met an error and goes on trying: {trouble}", "mend what it names")
    if job.suspend_requested_at is not None and job.state is RunState.QUEUED:
        return _said(job, "suspended", f"the job {job.reason}", f"twinstep resume {job.id} lets it go on")
    if job.state in _NOT_BEGUN and (found := cluster_waits(diagnosis, job.reason)) is not None:
        return _said(job, found.cause, found.text.rstrip(".") + _waited(job, now), found.next_step, _pods(diagnosis))
    if job.state in (RunState.PENDING, RunState.QUEUED):
        live = _waiting(job, _waited(job, now))
    else:
        live = _live(job, now)
    if job.attempt > 1 and job.progress is None:
        told = f" Attempt {job.attempt} goes on {goes_on_from(saved)}."
        live = live.model_copy(update={"text": live.text + told})
    return live


_NOT_BEGUN = (RunState.PENDING, RunState.QUEUED, RunState.STARTING)


def _said(job: JobDetail, cause: str, text: str, next_step: str, evidence: Sequence[str] = ()) -> Explanation:
    lines = [line.strip()[:MAX_EVIDENCE] for line in evidence]
    return Explanation(state=job.state, cause=cause, text=_sentence(text), next_step=next_step, evidence=lines)


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _waited(job: JobDetail, now: float | None) -> str:
    """Return, where a run has waited for long, for how long."""
    if now is None or job.started_at is not None or now - job.run_created_at < LONG_WAIT_S:
        return ""
    return f"; it has waited for {duration(now - job.run_created_at)}"


def _waiting(job: JobDetail, waited: str) -> Explanation:
    if ahead := re.search(r"waits for (\d+) runs? ahead", job.reason):
        return _said(
            job, "waits_for_others", f"the job {ahead[0]}: the control plane runs only so many at once{waited}",
            "wait, cancel one of them, or start the control plane with a larger --max-parallel",
        )  # fmt: skip
    if job.reason == NEEDS_MODULES:
        return _said(
            job, "needs_modules", f"the job {job.reason}: its model is code of its submitter's own{waited}",
            "have one started so, where every submitter may run code, or run it on your machine: twinstep train",
        )  # fmt: skip
    return _said(job, "waits", f"the job {job.reason}{waited}", "nothing, unless it stays so")


def _live(job: JobDetail, now: float | None) -> Explanation:
    heard = job.heartbeat_at or job.started_at
    if now is not None and heard is not None and now - heard > SILENT_S:
        return _said(
            job, "silent", f"the job is {job.state}, and its worker was not heard of for {duration(now - heard)}",
            "read its log; a worker that is stuck is ended by cancelling the job",
        )  # fmt: skip
    if job.progress is None:
        return _said(job, "starting", f"the job is {job.state}: {job.reason}", "")
    steps = f"step {job.progress.step} of {job.progress.total_steps}"
    return _said(job, "runs", f"the job is {job.progress.phase}, at {steps}", "")


def _pods(diagnosis: Diagnosis | None) -> list[str]:
    return [] if diagnosis is None else [words_of(pod) for pod in diagnosis.pods]


def _failure(job: JobDetail, events: Sequence[Event], log: Sequence[str], diagnosis: Diagnosis | None) -> Explanation:
    failed = next((event for event in reversed(events) if event.name == "failed"), None)
    pods = _pods(diagnosis)
    by_reason = next((row for row in _REASONS if job.reason.startswith(row[0])), None)
    if by_reason is not None and by_reason[1] in _LIMITS:  # whatever failed before, it went on, or waited, until then
        shown = pods + [line for line in log if line.strip()][-3:]
        return _said(job, by_reason[1], f"the job failed: {job.reason}", by_reason[2], shown)
    lines = [*log, *([failed.reason] if failed is not None else []), *pods, job.reason]
    for signature in SIGNATURES:
        shown = [line for line in lines if re.search(signature.pattern, line)]
        if shown:
            place = f" at step {failed.data['step']}" if failed is not None and failed.data.get("step") else ""
            text = f"the job failed{place}: {signature.text}" + (f"; {pods[0]}, before any other" if pods else "")
            return _said(job, signature.cause, text, signature.next_step, list(dict.fromkeys(shown))[-3:])
    if (found := pods_failed(diagnosis)) is not None:
        shown = pods + [line for line in log if line.strip()][-3:]
        return _said(job, found.cause, f"the job failed: {found.text}", found.next_step, shown)
    told = failed.reason if failed is not None else job.reason
    problem, _, remedy = told.partition("; fix: ")
    if not remedy:
        problem, _, remedy = told.partition(" (fix: ")
    if remedy:
        return _said(job, "error", f"the job failed: {problem}", remedy.rstrip(")"))
    if by_reason is not None:
        return _said(job, by_reason[1], f"the job failed: {job.reason}", by_reason[2])
    return _said(job, "unknown", f"the job failed: {told}", "read the log", [line for line in log if line.strip()][-3:])


_REASONS = (
    (
        "its objects are gone from the cluster",
        "lost",
        "twinstep retry; its cluster's audit log says who deletes them",
    ),
    ("the cluster refused it", "refused", "mend what it names in the spec, and submit it again"),
    ("it cannot be started", "refused", "mend what it names in the spec, and submit it again"),
    ("it failed more often than it may", "restarts", "read its log, mend what fails, and twinstep retry it"),
    ("stopped at its time limit", "time_limit", "raise runtime.max_seconds"),
    (
        "waited too long to be started",
        "wait_limit",
        "raise runtime.max_wait_seconds, ask for a smaller machine, or twinstep retry it when there is room",
    ),
    ("stopped from outside", "stopped", "submit it again"),
    ("its supervisor vanished", "supervisor_lost", "submit it again: the machine restarted, or somebody killed it"),
    ("its supervisor could not be started", "supervisor", "see the control plane's own output; disk, process limits"),
    ("its directory is gone", "directory_lost", "submit it again"),
    ("its spec is not one", "spec_version", "submit a spec of this version"),
    ("its worker ended with SIGKILL", "killed", "lower data.rows or data.batch_size: the kernel kills the largest"),
)
"""Beginning of a run's reason, its cause's name, what to do."""
_LIMITS = ("time_limit", "wait_limit")
