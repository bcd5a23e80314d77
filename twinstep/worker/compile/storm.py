"""Recompile storms: a step that is compiled again and again, and the field of its key that keeps changing."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from twinstep.worker.compile.key import CompileKey, changes

MAX_COMPILES = 4
WINDOW = 50  # steps


@dataclass(frozen=True, slots=True)
class Storm:
    """More compiles than there should be, within some steps."""

    field: str
    """What changed in most of them: a named size, a batch leaf, a module's attribute, a field of the key."""
    compiles: int
    steps: int
    remedy: str

    @property
    def text(self) -> str:
        """The storm in one line."""
        return (
            f"compiled {self.compiles} times in {self.steps} steps; what keeps changing is {self.field}: {self.remedy}"
        )


class StormWatch:
    """Counts compiles over steps; `compiled` returns a Storm where there are more than `max_compiles` in `window`.

    It then keeps quiet for as many steps as the window has, twice as many each time.
    """

    def __init__(self, *, max_compiles: int = MAX_COMPILES, window: int = WINDOW) -> None:
        self._max, self._window, self._quiet = max_compiles, window, window
        self._step = 0
        self._quiet_until = 0
        self._compiles: deque[tuple[int, tuple[tuple[str, str], ...]]] = deque()

    def step(self) -> None:
        """Count a step."""
        self._step += 1

    def compiled(self, before: CompileKey | None, now: CompileKey) -> Storm | None:
        """Count a compile; the first one of all is none."""
        if before is None:
            return None
        self._compiles.append((self._step, changes(before, now)))
        while self._compiles[0][0] <= self._step - self._window:
            self._compiles.popleft()
        if len(self._compiles) <= self._max or self._step < self._quiet_until:
            return None
        self._quiet_until, self._quiet = self._step + self._quiet, 2 * self._quiet
        counted = Counter(each for _, changed in self._compiles for each in changed)
        (kind, name), _ = counted.most_common(1)[0] if counted else (("key", "the key"), 0)
        steps = self._step - self._compiles[0][0] + 1
        return Storm(name, len(self._compiles), steps, REMEDIES.get(kind, "keep it as it is between steps"))


REMEDIES = {
    "sizes": "pad batches to one size, or to a few buckets",
    "batch": "pad batches to one shape, or to a few buckets",
    "structure": "give every batch the same fields",
    "state": "keep shapes and frozen parameters as they are, or change them rarely",
    "hyperparameters": "change it rarely; a learning rate may change at every step",
    "modules": "keep what changes at every step in a buffer, or give it with the batch",
    "ambient": "enter autocast inside the step, or always around it",
    "step": "keep what changes at every step in a buffer, or give it with the batch",
}
"""What to do, by field of the key."""
