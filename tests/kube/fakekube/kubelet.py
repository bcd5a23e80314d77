"""The scheduler and the kubelet: pods find a node, wait for what they mount, run, write, end as told, and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinstep.platform.scheduler.cluster.evidence import seconds

from .logs import Logs
from .resources import Object
from .world import World, fresh_status, going, holds

SIGTERM, SIGKILL = 143, 137


@dataclass(kw_only=True)
class Ending:
    """How containers end."""

    code: int = 0
    reason: str = ""
    """`OOMKilled`; empty: Completed or Error, by the code."""
    disrupted: bool = False
    """The node was taken away: the pod gets the condition DisruptionTarget."""
    message: str = ""


@dataclass
class Work:
    """What a container does. The default starts at once, says so, and runs until it is told to end."""

    seconds: float | None = None
    """It ends by itself after so long; None: never."""
    ending: Ending = field(default_factory=Ending)
    lines: tuple[str, ...] = ("started\n",)
    """Written when it starts."""
    last: str = ""
    """Written when it is told to stop (SIGTERM)."""
    pull: str = ""
    """Why its image does not come: `ErrImagePull`; empty: it does."""


class Kubelet:
    """All nodes."""

    def __init__(self, world: World, logs: Logs) -> None:
        self._world = world
        self._logs = logs
        self.full = ""
        """Why no node takes a pod: the scheduler's message; empty: one does."""
        self.work: Callable[[Object], Work] = lambda pod: Work()
        """What a pod's main container does."""
        self._told: dict[str, Ending] = {}

    # ---- what a test does ----

    def end(self, pod: Object, ending: Ending | None = None) -> None:
        """Let a pod's containers end in the next step."""
        self._told[pod["metadata"]["uid"]] = ending or Ending()

    def write(self, pod: Object, text: str | bytes, *, container: str = "") -> None:
        """Let a pod's container write."""
        name = container or pod["spec"]["containers"][0]["name"]
        self._logs.write(pod["metadata"]["uid"], name, text)

    # ---- the controller ----

    def step(self) -> None:
        """Look at every pod once; logs of pods that are gone go too."""
        pods = self._world.objects.list("Pod")
        self._logs.keep({pod["metadata"]["uid"] for pod in pods})
        for pod in pods:
            self._look(pod)

    def _look(self, pod: Object) -> None:
        phase = (pod.get("status") or {}).get("phase", "Pending")
        if going(pod):
            self._take_down(pod, phase)
        elif phase == "Pending" and not pod["spec"].get("nodeName"):
            self._schedule(pod)
        elif phase == "Pending":
            self._start(pod)
        elif phase == "Running":
            self._run(pod)

    def _schedule(self, pod: Object) -> None:
        world, status = self._world, fresh_status(pod)
        if self.full:
            world.condition(status, "PodScheduled", False, "Unschedulable", self.full)
            world.event(pod, "FailedScheduling", self.full, warning=True, by="default-scheduler")
            world.status(pod, status)
            return
        bound = world.patch(pod, {"spec": {"nodeName": f"node-{pod['metadata']['uid'][:4]}"}}, manager="scheduler")
        if bound is not None:
            world.condition(status, "PodScheduled", True, "Scheduled")
            status["containerStatuses"] = [_waiting(name, "ContainerCreating") for name in _containers(pod)]
            world.status(bound, status)

    def _start(self, pod: Object) -> None:
        world, status, work = self._world, fresh_status(pod), self.work(pod)
        if why := work.pull or self._missing(pod):
            status["containerStatuses"] = [_waiting(name, why) for name in _containers(pod)]
            world.event(pod, "Failed", f"Error: {why}", warning=True, by="kubelet")
            world.status(pod, status)
            return
        status |= {"phase": "Running", "startTime": world.stamp, "podIP": "10.0.0.1"}
        state = {"running": {"startedAt": world.stamp}}
        status["containerStatuses"] = [_container(name, state, ready=True) for name in _containers(pod)]
        world.condition(status, "Ready", True, "")
        world.status(pod, status)
        for line in work.lines:
            self.write(pod, line)

    def _missing(self, pod: Object) -> str:
        """Return why a container cannot be made: a Secret or a ConfigMap that is not there."""
        namespace = pod["metadata"]["namespace"]
        for container in pod["spec"]["containers"]:
            for entry in container.get("env", ()):
                key = (entry.get("valueFrom") or {}).get("secretKeyRef")
                if key and not key.get("optional") and not self._world.get("Secret", namespace, key["name"]):
                    return "CreateContainerConfigError"
        for volume in pod["spec"].get("volumes", ()):
            name = (volume.get("configMap") or {}).get("name")
            if name and not self._world.get("ConfigMap", namespace, name):
                return "ContainerCreating"
        return ""

    def _run(self, pod: Object) -> None:
        uid, work = pod["metadata"]["uid"], self.work(pod)
        ending = self._told.pop(uid, None)
        if ending is None and work.seconds is not None:
            started = seconds(pod["status"]["startTime"]) or 0.0
            ending = work.ending if self._world.now - started >= work.seconds else None
        if ending is not None:
            self._stop(pod, ending)

    def _stop(self, pod: Object, ending: Ending) -> None:
        world, status = self._world, fresh_status(pod)
        reason = ending.reason or ("Error" if ending.code else "Completed")
        began = status.get("startTime", world.stamp)
        over = {"exitCode": ending.code, "reason": reason, "startedAt": began, "finishedAt": world.stamp}
        if ending.message:
            over["message"] = ending.message
        status["containerStatuses"] = [_container(name, {"terminated": over}) for name in _containers(pod)]
        status["phase"] = "Failed" if ending.code else "Succeeded"
        world.condition(status, "Ready", False, "PodFailed" if ending.code else "PodCompleted")
        if ending.disrupted:
            said = "node is shutting down"
            world.condition(status, "DisruptionTarget", True, "TerminationByKubelet", said)
        world.status(pod, status)
        for name in _containers(pod):
            self._logs.end(pod["metadata"]["uid"], name)

    def _take_down(self, pod: Object, phase: str) -> None:
        """Stop a pod's containers, then let it go."""
        uid = pod["metadata"]["uid"]
        if phase == "Running":
            if text := self.work(pod).last:
                self.write(pod, text)
            self._stop(pod, self._told.pop(uid, None) or Ending(code=SIGTERM))
            return
        self._world.delete(pod, grace=0)


def _containers(pod: Object) -> list[str]:
    return [each["name"] for each in pod["spec"]["containers"]]


def _container(name: str, state: Object, *, ready: bool = False) -> Object:
    return {"name": name, "state": state, "ready": ready, "restartCount": 0, "image": "i", "imageID": ""}


def _waiting(name: str, reason: str) -> Object:
    return _container(name, {"waiting": {"reason": reason}})


def is_ready(pod: Object) -> bool:
    """Say whether a pod runs and answers."""
    return holds(pod, "Ready") and not going(pod)
