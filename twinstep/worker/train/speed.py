"""How fast a run trains: examples a second over whole iterations, lately and all together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

SPEED_WINDOW = 20  # steps that the reported speed is averaged over


class Speed:
    """Speed of whole iterations: from the moment a step's loss is known to the next step's.

    Reporting, waiting for data and looking up the program count; what is left out (compiling, evaluating) does not.
    Over the last few iterations for people, over all for the summary.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        self._mark = 0.0
        self._left_out = 0.0
        self.seconds = 0.0
        self.examples = 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint holds of it."""
        return {"seconds": self.seconds, "examples": self.examples}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`."""
        self.seconds, self.examples = float(state["seconds"]), int(state["examples"])

    def start(self) -> None:
        """Begin the first iteration."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Take `seconds` of the current iteration for none of it."""
        self._left_out += seconds

    def lap(self, examples: int) -> None:
        """End an iteration that trained on `examples`, and begin the next."""
        seconds = self._since()
        self._recent.append((seconds, examples))
        self.examples += examples

    def end(self) -> None:
        """Count what followed the last step's loss: its report."""
        self._since()

    def _since(self) -> float:
        now = time.perf_counter()
        seconds = max(now - self._mark - self._left_out, 1e-9)
        self._mark, self._left_out = now, 0.0
        self.seconds += seconds
        return seconds

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / max(len(self._recent), 1)

    @property
    def examples_per_s(self) -> float:
        return sum(examples for _, examples in self._recent) / max(sum(seconds for seconds, _ in self._recent), 1e-9)

    @property
    def examples_per_s_overall(self) -> float:
        return self.examples / max(self.seconds, 1e-9)
