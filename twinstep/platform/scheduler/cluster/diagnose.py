"""What went wrong with a run's pods, first things first: pods as the cluster has them → a Diagnosis. Pure.

One pod fails, and takes a hundred others with it that only report its absence: the first is the one to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from twinstep.platform.scheduler.cluster.evidence import Evidence, Object, holds, number, seconds
from twinstep.platform.scheduler.cluster.status import UNSCHEDULABLE, Finding
from twinstep.platform.store.records import Diagnosis, PodTrouble
from twinstep.spec.states import RunState
from twinstep.spec.words import EXIT_ABORTED, FOLLOWS

MAX_PODS = 3
MAX_TEXT = 500  # characters of a message that are kept
CANNOT_START = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "CrashLoopBackOff",
)  # fmt: skip
"""What a kubelet calls it when it cannot start a container."""


ABORT_S = 60.0
"""Seconds that a failed worker may take to end after its peers were: it still tells what it has to."""
TAKEN_ALONG = (*FOLLOWS, 143)
"""Exit codes of a worker whose peer is gone, or whose pod was ended with the job's."""


def diagnose(evidence: Evidence, finding: Finding, *, before: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what is to be kept of a look, as JSON; None where there is nothing to say.

    Args:
        before: what was kept last. Pods that failed are not forgotten when they are gone.
    """
    known = Diagnosis.model_validate(before) if before else Diagnosis()
    pods = _first_first(_troubles(evidence.pods))
    waits = finding.state is RunState.QUEUED or finding.code == UNSCHEDULABLE
    found = Diagnosis(
        code=finding.code,
        waits=finding.reason[:MAX_TEXT] if waits else "",
        pods=pods[:MAX_PODS] or known.pods,
    )
    return found.model_dump(mode="json", exclude_defaults=True) or None


def _first_first(troubles: Iterable[PodTrouble]) -> list[PodTrouble]:
    """Return troubles by time; a worker that missed another one comes after those that failed soon, within ABORT_S.

    A worker whose peer is gone is ended by SIGABRT (JAX, NCCL) or says so, and its kubelet may before the peer's own
    does. An abort is what others missed where no worker failed by itself.
    """
    found = sorted(troubles, key=lambda each: (each.time is None, each.time or 0.0, each.pod))
    if not found or found[0].exit_code not in FOLLOWS:
        return found
    until = (found[0].time or 0.0) + ABORT_S
    near = [each for each in found if (each.time or 0.0) <= until]
    causes = [each for each in near if each.exit_code not in (None, *TAKEN_ALONG)]
    causes = causes or [each for each in near if each.exit_code == EXIT_ABORTED]
    return causes + [each for each in found if each not in causes]


def _troubles(pods: Any) -> Iterator[PodTrouble]:
    for pod in pods:
        status = pod.get("status") or {}
        statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        found = [trouble for each in statuses if (trouble := _of_container(pod, each)) is not None]
        yield from found
        disrupted = holds(pod, "DisruptionTarget")
        if not found and (disrupted or status.get("reason") in ("Evicted", "Preempting", "NodeLost")):
            reason = status.get("reason") or (disrupted.reason if disrupted else "")
            message = status.get("message") or (disrupted.message if disrupted else "")
            yield _trouble(pod, reason=reason, message=message, at=disrupted.since if disrupted else None)


def _of_container(pod: Object, status: Object) -> PodTrouble | None:
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            return _trouble(
                pod,
                container=status.get("name") or "",
                code=ended["exitCode"],
                reason=ended.get("reason") or "",
                message=ended.get("message") or "",
                at=seconds(ended.get("finishedAt")),
            )
    waiting = (status.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in CANNOT_START:
        return _trouble(
            pod, container=status.get("name") or "", reason=waiting["reason"], message=waiting.get("message") or ""
        )
    return None


def _trouble(
    pod: Object,
    *,
    container: str = "",
    code: int | None = None,
    reason: str,
    message: str,
    at: float | None = None,
) -> PodTrouble:
    metadata = pod["metadata"]
    labels = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    return PodTrouble(
        pod=metadata["name"],
        slice=number(labels.get("jobset.sigs.k8s.io/job-index")),
        host=number(labels.get("batch.kubernetes.io/job-completion-index")),
        restart=number(labels.get("jobset.sigs.k8s.io/restart-attempt")) or 0,
        container=container,
        exit_code=code,
        reason=reason,
        message=" ".join(message.replace("\0", "").split())[:MAX_TEXT],
        time=at,
    )


def place_of(trouble: PodTrouble) -> str:
    """Say where a pod stood: `host 3 of slice 0`, or its name."""
    if trouble.slice is None or trouble.host is None:
        return f"pod {trouble.pod}"
    return f"host {trouble.host} of slice {trouble.slice} (pod {trouble.pod})"


def words_of(trouble: PodTrouble) -> str:
    """Say in words how a container ended."""
    if trouble.exit_code is None:
        how = trouble.reason or "trouble"
    elif trouble.reason == "OOMKilled":
        how = "ran out of memory (OOMKilled)"
    elif trouble.exit_code > 128 and trouble.exit_code - 128 in SIGNALS:
        how = f"was ended by {SIGNALS[trouble.exit_code - 128]}"
    else:
        how = f"ended with exit code {trouble.exit_code}"
    return f"{place_of(trouble)} {how}" + (f": {trouble.message}" if trouble.message else "")


SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
           11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}  # fmt: skip
"""Signals by number, as Linux has them on the machines that clusters are made of."""
