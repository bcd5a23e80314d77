"""What may be done to a job from its page: cancel, retry, suspend, resume, resize. Each says what it does, and asks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from twinstep.platform.dashboard import theme
from twinstep.platform.dashboard.reader import Reader
from twinstep.platform.dashboard.views import JobWithRuns
from twinstep.platform.scheduler.attempts import Resize
from twinstep.spec.errors import SpecError, TwinstepError
from twinstep.spec.topology import TPUS, topologies

NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class AskedAction:
    """One thing that may be done."""

    name: str
    label: str
    title: str
    """Of the question; {name} is the job's."""
    what: str
    """What will happen."""
    confirm: str
    refuse: str = "Not now"
    style: str = ""


ACTIONS = (
    AskedAction(
        "retry", "Retry", "Run {name} again?",
        "A new run of the job begins, from its first step. What the runs before it reported is kept.", "Run it again",
    ),
    AskedAction(
        "resume", "Resume", "Let {name} go on?",
        "A suspended run goes on. After one that failed or was cancelled a new one begins, where that one came to.",
        "Let it go on",
    ),
    AskedAction(
        "suspend", "Suspend", "Suspend {name}?",
        "Its pods are asked to save and stop, and its nodes are given back. Resume lets it go on.", "Suspend the job",
    ),
    AskedAction(
        "resize", "Resize…", "Run {name} at another size?",
        "The run is stopped, and a new one of this size goes on from where it came to.", "Change its size",
    ),
    AskedAction(
        "cancel", "Cancel", "Cancel {name}?",
        "Its worker is asked to stop, and killed if it does not within its grace time. "
        "What it has reported so far is kept.",
        "Cancel the job", "Keep running", "tw-btn-bad",
    ),
)  # fmt: skip


def possible(job: JobWithRuns) -> frozenset[str]:
    """Return the names of what makes sense for a job as it is."""
    row = job.row
    if row.state == "succeeded":
        return frozenset()
    if row.final:
        return frozenset({"retry", "resume", *(["resize"] if job.in_cluster else [])})
    if row.cancel_requested:
        return frozenset()
    steer = {"resize", "resume" if job.suspended else "suspend"} if job.in_cluster else set()
    return frozenset({"cancel", *steer})


class Actions:
    """The buttons, and the question each of them asks."""

    def __init__(self, reader: Reader, job: JobWithRuns, *, after: Callable[[], Awaitable[None]]) -> None:
        self.reader, self.job, self.after = reader, job, after
        self.asked = ACTIONS[-1]
        self.size: dict[str, Any] = {}
        self.buttons: dict[str, ui.element] = {}
        with theme.div("tw-actions"):
            for action in ACTIONS:
                self.buttons[action.name] = (
                    theme.button(action.label, action.style).on("click", lambda action=action: self._ask(action))
                ).mark(action.name)
        with ui.dialog() as self.dialog, theme.div("tw-dialog"):
            self.title = theme.text("", "tw-empty-title")
            self.what = theme.text("", "tw-dim")
            self.fields = theme.div("tw-fields")
            self.problem = theme.text("", "tw-login-error tw-hide").props('role="alert"')
            with theme.div("tw-dialog-row"):
                self.refuse = theme.button("").on("click", self.dialog.close)
                self.confirm = theme.button("", "tw-btn-fill").on("click", self._do).mark("confirm")
        self.update(job)

    def update(self, job: JobWithRuns) -> None:
        """Show what may be done now."""
        self.job = job
        now = possible(job) if job.may_steer else frozenset()
        for name, button in self.buttons.items():
            # Cancel stays where it is: what is looked for in a hurry must not move.
            theme.show(button, name in now or name == "cancel")
            theme.enable(button, name in now)
        stopping = job.row.cancel_requested and not job.row.final
        self.buttons["cancel"].set_text("Cancelling…" if stopping else "Cancel")  # type: ignore[attr-defined]

    def _ask(self, action: AskedAction) -> None:
        self.asked, self.size = action, {}
        self.title.set_text(action.title.format(name=self.job.row.name))
        self.what.set_text(action.what)
        self.refuse.set_text(action.refuse)
        self.confirm.set_text(action.confirm)
        fill, main = "tw-btn-fill", "tw-btn-main"
        self.confirm.classes(
            add=fill if action.name == "cancel" else main, remove=main if action.name == "cancel" else fill
        )
        theme.show(self.problem, False)
        self.fields.clear()
        if action.name == "resize":
            with self.fields:
                self._size_fields()
        self.dialog.open()

    def _size_fields(self) -> None:
        accelerator = self.job.spec["accelerator"]

        def set_text(field: str, text: str) -> None:
            self.size[field] = text or None

        def set_number(field: str, text: str) -> None:
            self.size[field] = int(text) if NUMBER.fullmatch(text) else text or None

        if accelerator["kind"] == "tpu":
            names = topologies(accelerator["generation"], up_to=256)
            options = {name: name for name in (*names, accelerator["topology"])}
            theme.select("Topology", options, accelerator["topology"], lambda text: set_text("topology", text))
            if 8 in TPUS[accelerator["generation"]].chips_per_host:
                sizes = {"": "as it must be", "4": "4", "8": "8"}
                theme.select("Chips per host", sizes, "", lambda text: set_number("chips_per_host", text))
            theme.number("Slices", str(accelerator.get("slices", 1)), lambda text: set_number("slices", text))
        elif accelerator["kind"] == "gpu":
            theme.number("GPUs", str(accelerator["count"]), lambda text: set_number("gpus", text))
        theme.number(
            "Batch size", str(self.job.spec["data"]["batch_size"]), lambda text: set_number("batch_size", text)
        )

    async def _do(self) -> None:
        job_id, name = self.job.row.id, self.asked.name
        try:
            if name == "resize":
                await asyncio.to_thread(self.reader.resize, job_id, self._size())
            else:
                await asyncio.to_thread(self.reader.steer, job_id, name)
        except TwinstepError as error:
            self.problem.set_text("\n".join(fault.line() for fault in error.faults) or str(error))
            theme.show(self.problem, True)
            return
        self.dialog.close()
        await self.after()

    def _size(self) -> Resize:
        given = {field: value for field, value in self.size.items() if value is not None}
        for field, value in given.items():
            if field != "topology" and not isinstance(value, int):
                raise SpecError(f"{field}: {value[:20]!r} is no whole number", remedy="give digits alone")
        return Resize.model_validate(given)
