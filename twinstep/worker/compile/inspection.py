"""What a Runner can show of its program: tables, texts, a picture. All of it is made when asked for, and not kept.

What makes it is imported then too: a run that nobody looks into starts the sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from twinstep.spec.errors import CompileError

if TYPE_CHECKING:
    from twinstep.worker.compile.annotate import Annotations, Spread
    from twinstep.worker.compile.capture import Captured
    from twinstep.worker.compile.explain import Explanation
    from twinstep.worker.compile.key import CompileKey

GraphStage = Literal["captured", "transformed", "lowered"]
GRAPH_STAGES: tuple[GraphStage, ...] = ("captured", "transformed", "lowered")


class Capture(Protocol):
    """Captures a step again, for looking at it."""

    def __call__(self, without: frozenset[str] = frozenset()) -> Captured: ...


class Inspectable:
    """The part of a Runner that shows what it runs."""

    key: CompileKey
    seconds: float | None
    """What it took to make the program; None where none was made."""
    _spread: Spread
    _capture_again: Capture

    @property
    def captured(self) -> Captured:
        """The step's graph."""
        raise NotImplementedError

    def program_text(self) -> str:
        """Return what the backend made of the graph, as text."""
        raise NotImplementedError

    def annotations(self) -> Annotations:
        """Return role, stage, module, batch dimensions and placement of every value.

        Raises:
            CompileError: the mesh does not divide the batch.
        """
        from twinstep.worker.compile.annotate import annotate

        return annotate(self.captured, self._spread)

    def explain(self) -> Explanation:
        """Return what the compiler did with the step, as tables; `print` shows them as text."""
        from twinstep.worker.compile.explain import explain

        return explain(self.captured, self.annotations(), self._facts())

    def _facts(self) -> dict[str, str]:
        sizes = " ".join(f"{name}={size}" for name, size in self.key.sizes)
        took = None if self.seconds is None else f"{self.seconds:.1f} s"
        facts = {"backend": self.key.backend, "key": self.key.digest, "compiled in": took, "sizes": sizes}
        return {name: value for name, value in facts.items() if value}

    def graph(self, stage: GraphStage) -> str:
        """Return the step as text: `captured` before the passes (captured anew for it), `transformed`, or `lowered`.

        Raises:
            CompileError: there is no such stage.
        """
        if stage == "captured":
            from twinstep.worker.compile.passes.table import PASSES

            return self._capture_again(frozenset(each.name for each in PASSES)).text
        if stage == "transformed":
            return self.captured.text
        if stage == "lowered":
            return self.program_text()
        raise CompileError(f"no stage is called {stage!r}", remedy=f"use one of {', '.join(GRAPH_STAGES)}")

    def draw(self, path: str | Path) -> None:
        """Write the step as an SVG picture.

        Raises:
            CompileError: the file's name ends in another format's ending, or it cannot be written.
        """
        from twinstep.worker.compile.draw import draw

        ending = Path(path).suffix.lower()
        if ending not in ("", ".svg"):
            raise CompileError(
                f"the picture is SVG, and {Path(path).name} ends in {ending}",
                remedy=f"name it {Path(path).with_suffix('.svg').name}; a browser opens and prints it",
            )
        title = "one training step: " + " · ".join(f"{name} {value}" for name, value in self._facts().items())
        picture = draw(self.captured.graph.graph, self.annotations(), title=title)
        try:
            Path(path).write_text(picture, encoding="utf-8")
        except OSError as error:
            raise CompileError(
                f"the picture cannot be written to {path}: {error.strerror}", remedy="give another path"
            ) from error


class Look(Inspectable):
    """A step that was captured to be looked at; it is lowered only where its program's text is asked for."""

    seconds = None

    def __init__(
        self, key: CompileKey, captured: Captured, spread: Spread, capture_again: Capture, lower: Callable[[], str]
    ) -> None:
        self.key = key
        self._captured = captured
        self._spread = spread
        self._capture_again = capture_again
        self._lower = lower

    @property
    def captured(self) -> Captured:
        """The step's graph."""
        return self._captured

    def program_text(self) -> str:
        """Lower the step, and return the program's text."""
        return self._lower()
