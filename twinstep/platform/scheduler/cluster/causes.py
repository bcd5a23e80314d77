"""What a diagnosis of a cluster means for a user: the cause, in words, and what to do about it. Pure tables.

Sources: Kueue v1beta2's reasons; kubelet's and the scheduler's words; JobSet's and KubeRay's reasons of failure.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.platform.scheduler.cluster.diagnose import CANNOT_START, words_of
from twinstep.platform.store.records import Diagnosis, PodTrouble
from twinstep.spec.words import EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_SPEC


@dataclass(frozen=True, slots=True)
class Cause:
    """Why, and what next."""

    cause: str
    """The cause's name, for programs."""
    text: str
    next_step: str


SMALLER = "ask for fewer chips (twinstep resize)"
WAITS: dict[str, tuple[str, str]] = {
    "Pending": ("queue", "wait; if it stays so, see that the queue is there: kubectl get localqueue"),
    "WaitingForQuota": ("quota", f"wait for jobs before it to end, or {SMALLER}"),
    "ExceedsMaxQuota": ("quota_exceeded", f"{SMALLER}, or have an admin raise the queue's quota: waiting is in vain"),
    "NoMatchingFlavor": (
        "no_flavor",
        "choose an accelerator that the queue has, or another queue",
    ),
    "TopologyPlacementFailed": ("no_place", f"wait until slices that belong together are free, or {SMALLER}"),
    "Misconfigured": ("queue_broken", "have an admin mend the queue: twinstep render --quota writes what one needs"),
    "Inadmissible": ("queue_broken", "see that kubernetes.queue names a LocalQueue of the namespace"),
    "PodsReadyTimeout": ("pods_late", "it is queued again; see whether images are pulled and nodes come up in time"),
    "Preempted": (
        "preempted",
        "nothing: it goes on when its queue admits it again; see kubernetes.priority",
    ),
    "Unschedulable": ("no_nodes", f"wait where the node pool grows by itself, else {SMALLER} or have nodes added"),
    "Suspended": ("suspended", "twinstep resume lets it go on"),
    "Suspending": ("suspended", "twinstep resume lets it go on"),
    "Deactivated": ("suspended", "twinstep resume lets it go on"),
    "Lost": ("lost", "twinstep retry; see in the cluster's audit log who deletes its objects"),
}
"""By the cluster's code for why a run waits: the cause's name, and what to do."""


def held_back(found: Diagnosis | None) -> bool:
    """Say whether a run waits because it is suspended in the cluster, whoever did that."""
    return found is not None and WAITS.get(_known(found.code), ("",))[0] == "suspended"


def _known(code: str) -> str:
    """Return a code as `WAITS` has it: Kueue adds why, as in DeactivatedDueToRequeuingLimitExceeded."""
    return code.partition("DueTo")[0]


def waiting(found: Diagnosis | None, reason: str) -> Cause | None:
    """Return why a run that has not begun waits in its cluster; None where the diagnosis does not say."""
    if found is None:
        return None
    stuck = next((pod for pod in found.pods if pod.reason in CANNOT_START), None)
    if stuck is not None and found.code in ("Starting", ""):
        return _stuck(stuck)
    if _known(found.code) not in WAITS:
        return None
    cause, step = WAITS[_known(found.code)]
    return Cause(cause, f"the job {reason}", step)


def _stuck(pod: PodTrouble) -> Cause:
    if "Image" in pod.reason or pod.reason.startswith("ErrImage"):
        step = "check kubernetes.image, and the node's right to pull it"
        return Cause("image", f"the worker's image cannot be pulled: {words_of(pod)}", step)
    if pod.reason == "CreateContainerConfigError":
        step = "see that every Secret that kubernetes.secret_env names is there, in the job's namespace"
        return Cause("config", f"a container cannot be made: {words_of(pod)}", step)
    step = "read the pod's events: kubectl describe pod"
    return Cause("container", f"a container does not start: {words_of(pod)}", step)


def failed(found: Diagnosis | None) -> Cause | None:
    """Return what the first pod that failed says of why; None where none did."""
    if found is None or not found.pods:
        return None
    first = found.pods[0]
    said = f"{words_of(first)}, before any other"
    if first.reason == "OOMKilled":
        return Cause("host_memory", said, "raise kubernetes.memory_gib, or lower data.rows or data.batch_size")
    if first.reason in ("Evicted", "Preempting", "NodeLost", "PreemptionByScheduler", "TerminationByKubelet",
                        "DeletionByTaintManager", "EvictionByEvictionAPI"):  # fmt: skip
        return Cause("node_lost", said, "twinstep resume: a new run goes on from this one, on other nodes")
    if first.reason in CANNOT_START:
        return _stuck(first)
    by_code = {
        EXIT_SPEC: ("spec", "read its log: the worker refused the spec, and trying again changes nothing"),
        EXIT_PEER_LOST: ("peer_lost", "see whether the pods reach each other, and whether a node went"),
        EXIT_PREEMPTED: ("preempted", "twinstep resume: it was told to stop, and saved what it had"),
        137: ("killed", "raise kubernetes.memory_gib if memory is short; else see who killed it: kubectl describe pod"),
        139: ("crash", "try compile.backend: eager to see whether the step itself is at fault, and report the log"),
        134: ("crash", "read its log: a library gave up"),
        143: ("stopped", "twinstep resume: it was told to stop from outside"),
    }
    if first.exit_code in by_code:
        cause, step = by_code[first.exit_code]
        return Cause(cause, said, step)
    return Cause("worker_failed", said, "read its log: twinstep logs")
