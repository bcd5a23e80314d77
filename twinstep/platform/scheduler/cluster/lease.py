"""Which of several control planes looks after the cluster's runs: the one that holds a Lease.

No clocks are compared. A replica takes a Lease over when it has watched it unchanged for the whole of its duration, by
its own clock; and the holder counts itself out, by its own clock too, before anybody can have watched for so long.
Times in the Lease are for people. (client-go's leaderelection does the same.)
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from twinstep.platform.scheduler.cluster.kube_api import KubeApi
from twinstep.spec.errors import ConflictError, TwinstepError

log = logging.getLogger(__name__)


def uptime() -> float:
    """Return seconds that only grow, and that a machine which slept has counted as well."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # Linux only
    return time.monotonic() if boot is None else time.clock_gettime(boot)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimes:
    """How long a Lease is held, and how it is renewed, in seconds."""

    lasts: float = 15.0
    """After so long without a renewal, others take it over."""
    holds: float = 10.0
    """After so long without a renewal, the holder gives up by itself; the rest is for what it is still doing."""
    every: float = 2.0
    """Between two tries to renew it or to take it over."""

    def __post_init__(self) -> None:
        if not 0 < self.every < self.holds < self.lasts:
            raise ValueError("a holder must renew before it gives up, and give up before others take over")


class Elector:
    """Takes part in the election for one Lease."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = uptime,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            api: one of its own, whose requests time out well before the Lease does.
            identity: this process's, unlike any other's.
            on_change: called when this one begins or ceases to lead; must not block.
        """
        self.identity = identity
        self._api = api
        self._namespace, self._name = namespace, name
        self._times = times or LeaseTimes()
        self._clock = clock
        self.on_change = on_change
        self._until = float("-inf")
        """This one leads up to then."""
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        """When the Lease was first seen as it is."""
        self._led = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this one leads now; ends by itself, whatever its thread is doing."""
        return self._clock() < self._until

    def start(self) -> None:
        """Begin to take part."""
        self._thread.start()

    def stop(self) -> None:
        """Cease to lead and let others take over at once."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)
        if self.leads:
            self._until = float("-inf")
            self._release()
        self._note()

    def _run(self) -> None:
        told = ""
        while not self._stopping.is_set():
            try:
                self.step()
                told = ""
            except TwinstepError as error:
                if told != str(error):
                    told = str(error)
                    log.warning("the lease %s/%s cannot be renewed: %s", self._namespace, self._name, error)
            except Exception:
                log.exception("the election failed; it goes on")
            self._note()
            self._stopping.wait(self._times.every * random.uniform(1.0, 1.2))

    def _note(self) -> None:
        if self.leads != self._led:
            self._led = self.leads
            log.info("%s %s the lease %s", self.identity, "holds" if self._led else "does not hold", self._name)
            self.on_change()

    def step(self) -> None:
        """Look at the Lease once; renew it or take it over where that is due.

        Raises:
            UnavailableError: the API server does not answer; who leads goes on as long as it may.
        """
        began = self._clock()
        lease = self._api.get("Lease", self._namespace, self._name)
        try:
            if lease is None:
                self._api.create(self._body({}, transitions=0))
                self._until = began + self._times.holds
                return
            spec = lease.get("spec") or {}
            holder, transitions = spec.get("holderIdentity") or "", int(spec.get("leaseTransitions") or 0)
            seen = (holder, spec.get("renewTime"), transitions, lease["metadata"].get("uid"))
            if seen != self._seen:
                self._seen, self._seen_at = seen, self._clock()
            if holder == self.identity:
                self._api.replace(self._body(lease, transitions=transitions))
            elif not holder or self._clock() - self._seen_at > float(spec.get("leaseDurationSeconds") or 0):
                self._api.replace(self._body(lease, transitions=transitions + 1))
            else:
                self._until = float("-inf")  # another one holds it: whatever this one believed
                return
        except ConflictError:
            return  # another one was quicker, or an answer was lost; the next step sees which
        self._until = began + self._times.holds

    def _release(self) -> None:
        try:
            lease = self._api.get("Lease", self._namespace, self._name)
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                body = self._body(lease, transitions=int(lease["spec"].get("leaseTransitions") or 0))
                body["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._api.replace(body)
        except TwinstepError as error:
            log.info("the lease could not be given up, and runs out instead: %s", error)

    def _body(self, lease: dict[str, Any], *, transitions: int) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        known = lease.get("spec") or {}
        ours = known.get("holderIdentity") == self.identity
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]  # only what was looked at is changed
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": max(1, round(self._times.lasts)),
                "acquireTime": known.get("acquireTime") if ours else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
