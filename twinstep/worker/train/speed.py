"""How fast a run trains: examples and tokens a second over whole iterations, lately and all together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from twinstep.worker.train.goodput import Goodput

SPEED_WINDOW = 20  # steps that the reported speed is averaged over


class Speed:
    """Speed of whole iterations: from the moment a step's loss is known to the next step's.

    Reporting, waiting for data and looking up the program count; what is left out (compiling, evaluating) does not.
    Over the last few iterations for people, over all for the summary.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=SPEED_WINDOW)
        """Seconds, examples and tokens of an iteration."""
        self._mark = 0.0
        self._left_out = 0.0
        self.seconds = 0.0
        self.examples = 0
        self.tokens = 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint holds of it."""
        return {"seconds": self.seconds, "examples": self.examples, "tokens": self.tokens}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`."""
        self.seconds, self.examples = float(state["seconds"]), int(state["examples"])
        self.tokens = int(state.get("tokens", 0))  # a checkpoint of before they were counted has none

    def start(self) -> None:
        """Begin the first iteration."""
        self._mark = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Take `seconds` of the current iteration for none of it."""
        self._left_out += seconds

    def lap(self, examples: int, tokens: int = 0) -> None:
        """End an iteration that trained on `examples` with histories of `tokens`, and begin the next."""
        seconds = self._since()
        self._recent.append((seconds, examples, tokens))
        self.examples += examples
        self.tokens += tokens

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
        return sum(seconds for seconds, _, _ in self._recent) / max(len(self._recent), 1)

    @property
    def examples_per_s(self) -> float:
        return self._recently(1)

    @property
    def tokens_per_s(self) -> float:
        return self._recently(2)

    def _recently(self, which: int) -> float:
        return sum(each[which] for each in self._recent) / max(sum(each[0] for each in self._recent), 1e-9)

    @property
    def examples_per_s_overall(self) -> float:
        return self.examples / max(self.seconds, 1e-9)

    @property
    def tokens_per_s_overall(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def told_of(phase: str, speed: Speed, goodput: Goodput) -> dict[str, Any]:
    """Return what a progress record says of speed, and of where time went; of no speed while a program is compiled."""
    compiling = phase == "compiling"
    return {
        "examples_per_s": None if compiling else speed.examples_per_s,
        "tokens_per_s": None if compiling else speed.tokens_per_s,
        **goodput.account(),
    }
