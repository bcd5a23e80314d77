"""Watch a job: its stream of server-sent events, taken up again where it broke, shown as a bar or as plain lines.

The stream's message ids are cursors, so nothing is missed or shown twice when the control plane restarts. What a
follower shows is in `live.py`; this file only carries messages.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from twinstep.cli.output import EXIT_FAILED, RemoteError, UnreachableError, console, print_json
from twinstep.spec.words import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from twinstep.cli.client import PlaneClient

GIVE_UP_S = 120.0  # a control plane that is away so long is not just restarting
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One server-sent event."""

    event: str
    data: str
    id: str


def parse_sse(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the messages of an event stream, as the HTML standard reads one; comments and other fields are passed over.

    A message without its blank line at the end (the stream broke) is dropped, as the standard says.
    """
    event, data, last_id = "", list[str](), ""
    for line in lines:
        if not line:
            if data:
                yield Message(event=event or "message", data="\n".join(data), id=last_id)
            event, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "data":
            data.append(value)
        elif name == "id" and "\0" not in value:
            last_id = value


def messages(
    plane: PlaneClient,
    job_id: str,
    *,
    kinds: Iterable[str],
    give_up_s: float = GIVE_UP_S,
    announce: Callable[[str], None] = lambda problem: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (event, data) of a job's stream until `end`, connecting again after every break.

    `announce(problem)` is told once of each break. Before the first connection an absent control plane is an error at
    once; later ones are waited for.

    Raises:
        UnreachableError: the control plane stayed away for `give_up_s` seconds, or was not there to begin with.
        NotFoundError: there is no such job.
    """
    path, last_id, tries, lost_at = f"/v1/jobs/{quote(job_id, safe='')}/stream", "", 0, 0.0
    connected_once = False
    while True:
        try:
            with plane.stream(path, params={"kinds": list(kinds)}, last_event_id=last_id) as lines:
                connected_once = True
                for message in parse_sse(lines):
                    tries, lost_at, last_id = 0, 0.0, message.id or last_id
                    yield message.event, _data(message)
                    if message.event == "end":
                        return
            problem: Exception | None = None  # closed without `end`: the control plane is ending
        except (UnreachableError, RemoteError) as error:
            if not connected_once:
                raise
            problem = error
        now = time.monotonic()
        lost_at = lost_at or now
        if now - lost_at > give_up_s:
            raise problem or UnreachableError(
                f"the stream of {job_id} keeps closing", remedy=f"try later: twinstep get {job_id}"
            )
        if tries == 1:  # one quick reconnect is nobody's concern
            announce("the control plane is away; the job goes on without it, waiting for it to come back")
        time.sleep(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
        tries += 1


def _data(message: Message) -> dict[str, Any]:
    try:
        data = json.loads(message.data)
    except ValueError:
        data = None
    return data if isinstance(data, dict) else {}


@contextlib.contextmanager
def left_alone(job_id: str) -> Iterator[None]:
    """Let Ctrl-C end the watching alone, and say so: the job goes on."""
    try:
        yield
    except KeyboardInterrupt:
        said = f"{job_id} goes on; twinstep logs {job_id} -f follows it, twinstep cancel {job_id} ends it"
        print(f"\n{said}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def follow_job(plane: PlaneClient, job_id: str, *, as_json: bool) -> int:
    """Show a job until it ends; return 0 where it succeeded, else 1."""
    from twinstep.cli.live import PlainView, RichView

    if as_json:
        return _follow_json(plane, job_id)
    screen = console()
    view = RichView(screen) if screen.is_terminal else PlainView()
    state = ""
    with left_alone(job_id), view:
        for event, data in messages(plane, job_id, kinds=("state", "event", "metrics"), announce=view.say):
            view.show(event, data)
            if event == "end":
                state = str(data.get("state"))
    view.finish(plane.job(job_id))
    return 0 if state == "succeeded" else EXIT_FAILED


def _follow_json(plane: PlaneClient, job_id: str) -> int:
    """Print each message as one JSON line, and the whole job last."""
    with left_alone(job_id):
        for event, data in messages(plane, job_id, kinds=("state", "event", "metrics")):
            if event != "end":
                print_json({event: data})
    job = plane.job(job_id)
    print_json({"job": job, "summary": job.get("summary")})
    return 0 if job["state"] == "succeeded" else EXIT_FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class Whose:
    """Whose lines of a log are wanted; None: everybody's."""

    slice: int | None = None
    host: int | None = None
    restart: int | None = None

    def fits(self, piece: dict[str, Any]) -> bool:
        """Say whether a piece of a log is wanted."""
        asked = {name: getattr(self, name) for name in ("slice", "host", "restart")}
        return all(number is None or piece.get(name) == number for name, number in asked.items())


def log_text(
    plane: PlaneClient, job_id: str, *, follow: bool, whose: Whose | None = None, run_id: str | None = None
) -> Iterator[str]:
    """Yield a job's log piece by piece: what is there, or with `follow` until the job ends.

    Where several processes wrote it, each line begins with whose it is: `0/3 | ` for host 3 of slice 0.
    """
    whose = whose or Whose()
    marks = Marks()
    path = f"/v1/jobs/{quote(job_id, safe='')}/logs"
    asked = {"slice": whose.slice, "host": whose.host, "restart": whose.restart, "run_id": run_id}
    given = {name: value for name, value in asked.items() if value is not None}
    if follow:
        if given:
            # A stream has everybody's lines, and could not say that there is no such host.
            plane.get(path, limit=4, **given)
        for event, data in messages(plane, job_id, kinds=("log",)):
            if event == "log":
                yield marks.text(data, whose)
        return
    offset = 0
    while True:
        part = plane.get(path, offset=offset, limit=1024 * 1024, **given)
        yield marks.text(part, whose)
        if part["next_offset"] == offset or part["next_offset"] >= part["size"]:
            return
        offset = part["next_offset"]


class Marks:
    """Marks lines by who wrote them, once they are pods' and not this machine's one process."""

    def __init__(self) -> None:
        self._last = ""
        self._open = False
        """The line that was written last has no end yet."""

    def text(self, part: dict[str, Any], whose: Whose) -> str:
        """Return a part's text, without what is not wanted."""
        text, at, shown = str(part.get("text", "")), 0, list[str]()
        for piece in part.get("spans") or [{"length": len(text), "slice": 0, "host": 0, "restart": 0}]:
            said, at = text[at : at + piece["length"]], at + piece["length"]
            if said and whose.fits(piece):
                shown.append(self._marked(said, _mark(piece)))
        return "".join(shown)

    def _marked(self, said: str, mark: str) -> str:
        begins = not self._open or mark != self._last
        before = "\n" if self._open and mark != self._last else ""
        self._open, self._last = not said.endswith("\n"), mark
        if not mark:
            return before + said
        lines = re.findall(r"[^\n]*\n|[^\n]+", said)
        return before + "".join((mark if number or begins else "") + line for number, line in enumerate(lines))


def _mark(piece: dict[str, Any]) -> str:
    if not piece.get("pod"):
        return ""
    if piece.get("host") is None:
        return f"{piece.get('role')} | "
    return f"{piece.get('slice')}/{piece['host']} | "
