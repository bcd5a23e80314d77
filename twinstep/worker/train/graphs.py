"""Captured graphs as text beside a run's files, where the spec wants them (debug.save_graph)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinstep.worker.compile import Runner


class SavedGraphs:
    """Writes each graph once, named by its key."""

    def __init__(self, directory: Path | None, *, tell: Callable[[str, str, dict[str, Any]], None]) -> None:
        """None: where a run by hand was started. `tell` gets the event of a graph that was written, or could not be."""
        self._directory, self._tell = directory, tell
        self._saved: set[str] = set()

    def save(self, program: Runner) -> None:
        """Write a program's graph; a place that cannot be written is told of, and ends no run."""
        if program.key.digest in self._saved:
            return
        self._saved.add(program.key.digest)
        path = (self._directory or Path.cwd()) / f"graph-{program.key.digest}.txt"
        try:
            path.write_text(program.captured.text, encoding="utf-8")
        except OSError as error:
            self._tell("graph_not_saved", f"the captured graph cannot be written to {path}: {error.strerror}", {})
            return
        self._tell("graph_saved", f"the captured graph is in {path}", {"file": path.name})
