"""Going back within a run: to the state before a batch that spoiled it, or to the last state in memory.

A step writes over the state it started from, so the state before a bad one is made again: from a copy in memory, by the
same steps without the bad batch. On a CPU that gives the very bits. The copy is as large as the state; it is taken only
where a spec drops batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.content import Snapshot, load_tensors
from twinstep.worker.compile.state import materialise
from twinstep.worker.train.engines import Stepper
from twinstep.worker.train.saving import restore_random

EVERY = 100  # steps between copies, where checkpoints are not taken by steps


class Interrupted(Exception):
    """A stop was asked for while steps were run again; the state is that before the batch of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Rewind:
    """A copy of the state of some step, and what to do from there."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        stepper: Stepper,
        tensors: Callable[[], dict[str, Tensor]],
    ) -> None:
        """`tensors` gives the run's state as the live model has it."""
        self._spec, self._model, self._optimizers, self._stepper = spec, model, optimizers, stepper
        self._tensors = tensors
        for key, optimizer in optimizers.items():  # what is made at the first step could not be brought back else
            materialise(key, optimizer)
        self._copy, self._next = Snapshot(), Snapshot()
        self._every = spec.checkpoint.every_steps or EVERY
        self._dropped: set[int] = set()
        self.step = 0
        """That the copy is of."""

    def due(self, step: int) -> bool:
        """Say whether the state after `step` is to be copied."""
        return not self._copy.tensors or (step != self.step and step % self._every == 0)

    def take(self, step: int) -> None:
        """Copy the state after `step`, unless it is spoiled already, as a loss to come will tell."""
        self._copy_live()
        if self._next.not_finite() is None or not self._copy.tensors:
            self._copy, self._next = self._next, self._copy
            self._dropped.clear()
            self.step = step

    def _copy_live(self) -> None:
        self._stepper.pull()
        self._next.take(self._tensors())

    def back(self) -> None:
        """Bring the copy's state back."""
        load_tensors(self._copy.tensors, self._model, self._optimizers)
        self._stepper.push()
        restore_random(self._stepper, self._spec, self._copy.tensors)

    def without(self, bad: int, run: Callable[[int], Any]) -> int:
        """Bring back the state before the step that spoiled it, by running all others since the copy again.

        Args:
            bad: number, from 0, of the batch whose loss was bad: it, or one before it, spoiled the state.
            run: runs the step of a batch, by number, or raises Interrupted before it.

        Returns:
            The number of the batch that is left out; the state is that after all before it.

        Raises:
            Interrupted: from `run`; the state is sound, and earlier.
        """
        self.back()
        for number in range(self.step, bad):
            if number in self._dropped:
                continue
            run(number)
            self._copy_live()
            if self._next.not_finite() is not None:
                return self.without(number, run)
        self._dropped.add(bad)
        return bad
