"""What can go wrong between a client and the API server, on request: which requests, how often, in which way."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Fault:
    """One way to fail, for requests that fit, so many times."""

    kind: str
    """`status`, `hang`, `drop`; of a watch also `gone`, `half_line`, `garbage`, `duplicate`, `old`, `close`, `mute`."""
    method: str = ""
    path: str = ""
    """A regular expression that is searched for in the path; empty: any."""
    watch: bool | None = None
    """Only watches, or only what is none."""
    left: int = 1
    code: int = 500
    reason: str = ""
    retry_after: int | None = None
    seconds: float = 0.0
    stored: bool = False
    """The request is carried out first, and its answer is lost."""
    events: int = 0
    """Events of a watch that come through before."""
    hits: int = 0
    """Times it has struck."""

    def fits(self, method: str, path: str, watch: bool) -> bool:
        """Say whether a request is one of those."""
        return (
            self.left > 0
            and (not self.method or self.method == method)
            and (not self.path or re.search(self.path, path) is not None)
            and (self.watch is None or self.watch is watch)
        )


@dataclass
class Faults:
    """Faults that wait for their requests. Every method may be called from any thread."""

    _waiting: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(
        self, code: int, *, method: str = "", path: str = "", times: int = 1, stored: bool = False,
        reason: str = "", retry_after: int | None = None, watch: bool | None = None,
    ) -> Fault:  # fmt: skip
        """Answer with a status instead; `stored`: after the request was carried out."""
        return self._add(
            Fault(
                kind="status", method=method, path=path, left=times, code=code, stored=stored, reason=reason,
                retry_after=retry_after, watch=watch,
            )
        )  # fmt: skip

    def hang(self, seconds: float, *, method: str = "", path: str = "", times: int = 1, stored: bool = True) -> Fault:
        """Give no answer for so long and then close the connection; by default after the request was carried out."""
        return self._add(Fault(kind="hang", method=method, path=path, left=times, seconds=seconds, stored=stored))

    def drop(self, *, method: str = "", path: str = "", times: int = 1, stored: bool = False) -> Fault:
        """Close the connection without an answer."""
        return self._add(Fault(kind="drop", method=method, path=path, left=times, stored=stored))

    def watch(self, kind: str, *, path: str = "", times: int = 1, events: int = 0, seconds: float = 0.0) -> Fault:
        """Break watches that are opened from now on, after `events` events.

        `gone`: an ERROR with code 410 in the stream of a 200; `half_line`: the next event is cut and the connection
        closed; `garbage`: a line that is no JSON, then go on; `duplicate`: each event comes twice; `old`: each event
        is followed by an older state of the same object; `close`: the stream ends after `seconds`; `mute`: nothing is
        sent any more, not even a bookmark, and the connection stays.
        """
        return self._add(Fault(kind=kind, path=path, left=times, events=events, seconds=seconds, watch=True))

    def clear(self) -> None:
        """Let everything through again."""
        with self._lock:
            self._waiting.clear()

    def take(self, method: str, path: str, watch: bool) -> Fault | None:
        """Return the fault that strikes this request."""
        with self._lock:
            for each in self._waiting:
                if each.fits(method, path, watch):
                    each.left -= 1
                    each.hits += 1
                    return each
        return None

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._waiting.append(fault)
        return fault
