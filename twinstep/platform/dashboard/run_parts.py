"""Parts of a job's page about its runs: where their time went, their hosts, what differs between two of them."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence

from nicegui import ui

from twinstep.platform.dashboard import theme, words
from twinstep.platform.dashboard.hosts import Grid
from twinstep.platform.dashboard.shares import Shares
from twinstep.platform.dashboard.timeline import Stretch, totals
from twinstep.platform.scheduler.explain import Explanation
from twinstep.spec.words import cut, duration

MAX_DIFF_LINES = 2000
SHOWN_RUNS = 8
DOCUMENTS = ("spec", "manifests", "preflight")


MAX_WARNINGS = 12


class Why:
    """Why a job is not running well, and what to do: on top of the page while there is something to say."""

    def __init__(self) -> None:
        self.shown: Explanation | None = None
        with theme.div("tw-reason tw-hide").mark("reason") as self.box:
            self.text = theme.text("")
            self.next_step = theme.text("", "tw-next tw-hide").mark("next-step")
            self.evidence = theme.div("tw-evidence tw-hide")

    def set(self, found: Explanation | None, *, bad: bool) -> None:
        """Show an explanation; None hides the box."""
        theme.show(self.box, found is not None)
        self.box.classes(add="tw-reason-bad") if bad else self.box.classes(remove="tw-reason-bad")
        if found is None or found == self.shown:
            self.shown = found
            return
        self.shown = found
        self.text.set_text(found.text)
        self.next_step.set_text(f"Next: {found.next_step}")
        theme.show(self.next_step, bool(found.next_step))
        theme.show(self.evidence, bool(found.evidence))
        self.evidence.clear()
        with self.evidence:
            for line in found.evidence[-6:]:
                theme.text(cut(words.printable(line), 400))


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return what is shown of warnings: the first ones, and how many more there are."""
    lines = [cut(words.printable(each), 400) for each in warnings[:MAX_WARNINGS]]
    more = len(warnings) - len(lines)
    return [*lines, f"and {more:,} more: GET /v1/jobs/JOB/events has all"] if more else lines


class Warned:
    """What speaks against a run that was let through: on its page from the moment it was submitted."""

    def __init__(self) -> None:
        with theme.div("tw-reason tw-hide").mark("warned") as self.box:
            theme.text("Let through with warnings:")
            self.lines = theme.div("tw-evidence")

    def set(self, warnings: Sequence[str]) -> None:
        """Show warnings; none hides the box."""
        theme.show(self.box, bool(warnings))
        self.lines.clear()
        with self.lines:
            for line in warning_lines(warnings):
                theme.text(line)


class Timeline:
    """A bar per run, as long as its run took against the longest."""

    def __init__(self) -> None:
        self.drawn: object = None
        with theme.card("Time", note="what each run spent it on"):
            self.body = theme.div("tw-times")

    def set(self, runs: Sequence[tuple[str, Sequence[Stretch]]]) -> None:
        """Show runs, the newest first: a name and its stretches; sent where a bar would move by half a percent."""
        shown = runs[:SHOWN_RUNS]
        longest = max((sum(each.seconds for each in found) for _, found in shown), default=0.0) or 1.0
        drawn = [(name, [(each.what, round(200 * each.seconds / longest)) for each in found]) for name, found in shown]
        if drawn == self.drawn:
            return
        self.drawn = drawn
        self.body.clear()
        with self.body:
            for name, found in shown:
                theme.text(name, "tw-small tw-dim tw-times-name")
                with theme.div("tw-times-run"):
                    with theme.div("tw-times-bar"):
                        for each in found:
                            part = theme.div(f"tw-times-part tw-time-{each.what}")
                            part.style(f"width: {100 * each.seconds / longest:.3f}%")
                            theme.with_props(part, title=f"{each.what}: {duration(each.seconds)}")
                    with theme.div("tw-times-legend"):
                        for what, seconds in totals(found).items():
                            with theme.div("tw-key"):
                                theme.div(f"tw-key-dot tw-time-{what}")
                                theme.text(f"{what} {duration(seconds)}", "tw-small tw-num")


class ShareCard:
    """A stacked bar with its parts in words; not to be seen while there is nothing to say."""

    def __init__(self, title: str, *, note: str, mark: str) -> None:
        self.drawn = Shares()
        with theme.div("tw-min tw-hide") as self.box, theme.card(title, note=note) as right:
            with right:
                self.says = theme.text("", "tw-num tw-h2")
            self.body = theme.div("tw-shares").mark(mark)

    def set(self, shares: Shares) -> None:
        """Show what a time went to."""
        if shares == self.drawn:
            return
        self.drawn = shares
        theme.show(self.box, bool(shares.parts))
        self.says.set_text(shares.says)
        self.body.clear()
        whole = shares.seconds or 1.0
        with self.body:
            with theme.div("tw-times-bar"):
                for part, seconds in shares.parts:
                    piece = theme.div(f"tw-times-part tw-part-{part}").style(f"width: {100 * seconds / whole:.3f}%")
                    theme.with_props(piece, title=f"{name_of(part)}: {duration(seconds)}")
            with theme.div("tw-times-legend"):
                for part, seconds in shares.parts:
                    with theme.div("tw-key"):
                        theme.div(f"tw-key-dot tw-part-{part}")
                        share = f"{100 * seconds / whole:.1f} %"
                        theme.text(f"{name_of(part)} {share} · {duration(seconds)}", "tw-small tw-num")
            with theme.div("tw-times-legend"):
                for name, figure in shares.facts:
                    theme.text(f"{name} {figure}", "tw-small tw-dim tw-num tw-wrap")


def name_of(part: str) -> str:
    """Return a part's name as people read it."""
    return {"tensorcore": "TensorCore", "sparsecore": "SparseCore"}.get(part, part.replace("_", " "))


class Hosts:
    """A cell per host."""

    def __init__(self) -> None:
        self.drawn: Grid | None = None
        with theme.card("Hosts") as right:
            with right:
                self.title = theme.text("", "tw-dim tw-small")
            self.body = theme.div("tw-hosts").mark("hosts")
            self.note = theme.text("", "tw-dim tw-small tw-note tw-hide")

    def set(self, grid: Grid) -> None:
        """Show a run's hosts."""
        if grid == self.drawn:
            return
        self.drawn = grid
        self.title.set_text(grid.title)
        self.note.set_text(grid.note)
        theme.show(self.note, bool(grid.note))
        self.body.clear()
        with self.body:
            for index, hosts in enumerate(grid.slices):
                if len(grid.slices) > 1:
                    theme.text(f"slice {index}", "tw-dim tw-small tw-times-name")
                with theme.div("tw-hosts-slice"):
                    for host in hosts:
                        # Text of a pod's own: an attribute, shown by the browser as it is.
                        cell = theme.text(str(host.host), f"tw-host tw-host-{host.state}")
                        theme.with_props(cell, title=cut(host.says, 600), tabindex="0", role="img")
                        cell.props["aria-label"] = cut(f"{host.state}: {host.says}", 600)
            if len(grid.slices) == 1 and len(grid.slices[0]) == 1:
                theme.text(cut(grid.slices[0][0].says.partition("\n")[2], 300), "tw-small tw-wrap tw-hosts-says")


class Documents:
    """The spec or the manifests of a run, what preflight says of it, or what differs from another run's."""

    def __init__(self, read: Callable[[int, str], Awaitable[str]], runs: Sequence[int]) -> None:
        self.read, self.runs = read, list(runs)
        self.kind, self.run, self.against, self.text = "spec", self.runs[-1], 0, ""
        with theme.card("Spec") as right:
            with right:
                self.choosers = theme.div("tw-filters tw-nowrap")
                theme.button("Copy", "tw-btn-small").on("click", self._copy).mark("copy")
            self.body = theme.div("tw-yaml").mark("spec")
        self._choosers()

    def _choosers(self) -> None:
        self.choosers.clear()
        with self.choosers:
            kinds = {kind: kind for kind in DOCUMENTS}
            theme.select("Show", kinds, self.kind, lambda value: self._choose(kind=value))
            if len(self.runs) > 1:
                runs = {str(number): str(number) for number in reversed(self.runs)}
                theme.select("Run", runs, str(self.run), lambda value: self._choose(run=int(value)))
                theme.select(
                    "Against", {"0": "–"} | runs, str(self.against), lambda value: self._choose(against=int(value))
                )

    async def _choose(self, *, kind: str | None = None, run: int | None = None, against: int | None = None) -> None:
        self.kind = kind if kind in DOCUMENTS else self.kind
        self.run = run if run in self.runs else self.run
        self.against = against if against is not None and against in (0, *self.runs) else self.against
        await self.show()

    async def set_runs(self, runs: Sequence[int]) -> None:
        """Take in that there are more runs; the newest is shown."""
        if list(runs) != self.runs:
            self.runs = list(runs)
            self.run = self.runs[-1]
            self._choosers()
            await self.show()

    async def show(self) -> None:
        """Read what is asked for, and show it."""
        self.text = await self.read(self.run, self.kind)
        other = await self.read(self.against, self.kind) if self.against else ""
        if self.body.is_deleted:
            return
        self.body.clear()
        with self.body:
            if not self.against:
                theme.text(self.text)
                return
            lines = difference(other, self.text, f"run {self.against}", f"run {self.run}")
            if not lines:
                theme.text("No difference.", "tw-dim")
            for line in lines[:MAX_DIFF_LINES]:
                kind = {"+": "tw-add", "-": "tw-gone", "@": "tw-dim"}.get(line[:1], "")
                theme.text(line or " ", kind)

    def _copy(self) -> None:
        ui.clipboard.write(self.text)
        ui.notify(f"{self.kind.capitalize()} copied", position="bottom", timeout=1500)


def difference(before: str, after: str, name_before: str, name_after: str) -> list[str]:
    """Return what differs between two texts, line by line, as `diff -u` writes it."""
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), name_before, name_after, lineterm=""))
