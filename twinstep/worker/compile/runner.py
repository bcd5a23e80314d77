"""Stage 6, run and commit: a Runner is one compiled step, for batches of one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.annotate import Spread
from twinstep.worker.compile.guards import Guarding
from twinstep.worker.compile.inputs import check_devices, check_finite, device_of, is_plain
from twinstep.worker.compile.inspection import Capture, Inspectable
from twinstep.worker.compile.interrupt import uninterrupted
from twinstep.worker.compile.kept import Made
from twinstep.worker.compile.key import (
    CompileKey,
    reason,
    tensor_info,
)
from twinstep.worker.compile.lifted import Lifted
from twinstep.worker.compile.program import Collect
from twinstep.worker.compile.standing import batch_info, standing
from twinstep.worker.compile.structure import OutputTree, Structure, batch_leaves, take_apart

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured


class Pending:
    """A step that was started."""

    def __init__(self, collect: Collect, tree: OutputTree, told: Callable[[Exception], None]) -> None:
        self._collect: Collect | None = collect
        self._tree = tree
        self._told = told
        self._outputs: Any = None

    def outputs(self) -> Any:
        """Wait for the step and return its outputs, in the structure the user's function returned them in.

        Raises:
            CompileError: the step failed on the device; the state went with it.
        """
        if self._collect is not None:
            collect, self._collect = self._collect, None
            try:
                self._outputs = self._tree.rebuild(collect())
            except Exception as error:
                self._told(error)
                raise
        return self._outputs


class Runner(Inspectable):
    """One compiled step, for batches of one shape.

    Calling it runs forward, backward and update, commits the new state, and returns the step's outputs in the
    structure the user's function returned them in.
    """

    def __init__(
        self,
        made: Made,
        lifted: Lifted,
        model: nn.Module,
        key: CompileKey,
        batch_spec: Structure,
        capture_again: Capture,
        with_gradients: Callable[[Any], Runner],
        spread: Spread,
        seconds: float,
    ) -> None:
        self.key = key
        self.seconds = seconds
        self._spread = spread
        self.batch_spec = batch_spec
        self._program = made.program
        self._kept = made.kept
        self._captured = made.captured
        self._lifted = lifted
        self._guarding = Guarding(made.kept.guard, made.kept.constants, lifted, [path for path, _, _ in key.batch])
        self._model = model
        self._capture_again = capture_again
        self._with_gradients = with_gradients
        self._absent = _absent(lifted)
        self._batch_info = tuple((shape, getattr(torch, dtype)) for _, shape, dtype in key.batch)
        self._standing = standing(lifted.state, model)
        self._device = device_of(lifted.state.live())
        self.check_finite = False  # set by who made this, as is the next
        self.given = 0
        """Leaves at the end of the batch that stand for what the program makes itself: their values are never read."""

    @property
    def captured(self) -> Captured:
        """The step's graph; traced now, which takes seconds, where the program came from disk.

        Raises:
            CompileError: model or optimizer are no longer what this was compiled for.
        """
        if self._captured is None:
            self._check_standing()
            self._captured = self._capture_again()
        return self._captured

    def program_text(self) -> str:
        """Return what the backend made of the graph: Inductor's code, or optimized HLO."""
        return self._program.text()

    def __call__(self, batch: Any) -> Any:
        """Run one step on `batch`.

        Raises:
            CompileError: the batch, or the model and optimizer, differ from what this was compiled for; nothing was
                changed.
        """
        self._follow_gradients(batch)
        self._check_standing()
        return self.run(batch)

    def _follow_gradients(self, batch: Any) -> None:
        """Become the Runner for the gradients there are, where this one is for none (or for some); it is compiled."""
        there = self._kept.from_none and self._lifted.state.holds_gradients()
        if there or _absent(self._lifted) != self._absent:
            finite, given = self.check_finite, self.given
            vars(self).update(vars(self._with_gradients(batch)))
            self.check_finite, self.given = finite, given

    def _check_standing(self) -> None:
        now = standing(self._lifted.state, self._model)
        if now != self._standing:
            was = dataclasses.replace(self.key, **self._standing)
            raise CompileError(
                f"compiled for something else: {reason(was, dataclasses.replace(self.key, **now))}",
                remedy="undo the change, compile anew, or use a StepCompiler, which compiles again by itself",
            )

    def run(self, batch: Any) -> Any:
        """Run one step on `batch`, for a caller that knows that model and optimizer are as they were.

        Raises:
            CompileError, DataError: as `dispatch`.
        """
        with uninterrupted():
            return self.dispatch(batch).outputs()

    def dispatch(self, batch: Any) -> Pending:
        """Start one step on `batch` without waiting for it, as `run` otherwise.

        On XLA the device works while the host makes the next batch, or starts the next step; on a CPU Inductor's
        program has run when this returns.

        Raises:
            CompileError: the batch differs from the example in structure, shape or dtype; nothing was changed.
            DataError: an id names no row; nothing was changed.
        """
        self._follow_gradients(batch)
        leaves, spec = take_apart(batch)
        if spec != self.batch_spec:
            self._refuse_structure(batch)
        if batch_info(leaves) != self._batch_info or not all(is_plain(leaf, self._device) for leaf in leaves):
            self._refuse(batch)
        if self.check_finite:
            check_finite(batch)
        # Programs are made for one layout of memory.
        leaves = [leaf.detach().contiguous() for leaf in leaves[: len(leaves) - self.given]]
        self._guarding.check(leaves)

        def told(error: Exception) -> None:
            self._guarding.explain(error, leaves)

        try:
            with uninterrupted():
                collect = self._program.start(self._lifted.state.learning_rates(), leaves)
                if self._kept.left:
                    self._lifted.backend.leave_gradients(self._kept.left)
        except Exception as error:
            told(error)
            raise
        return Pending(collect, self._kept.outputs, told)

    def _refuse_structure(self, batch: Any) -> None:
        had = [path for path, _, _ in self.key.batch]
        _, has, _ = batch_leaves(batch)
        missing = [path for path in had if path not in has]
        more = [path for path in has if path not in had]
        told = [f"{what} {', '.join(paths[:5])}" for what, paths in (("lacks", missing), ("adds", more)) if paths]
        raise CompileError(
            f"the batch's structure differs from the example's: {' and '.join(told) or 'other containers or order'}",
            remedy="give the fields the example had, or call the StepCompiler, which compiles again",
        )

    def _refuse(self, batch: Any) -> None:
        leaves, paths, _ = batch_leaves(batch)
        check_devices(batch, self._device)
        for path, leaf, (_, shape, dtype) in zip(paths, leaves, self.key.batch, strict=True):
            given = tensor_info(path, leaf)[1:]
            if given != (shape, dtype):
                mend = "pad to the compiled shape" if given[0] != shape else f"cast it: .to(torch.{dtype})"
                raise CompileError(
                    f"batch leaf {path} is {list(leaf.shape)} {given[1]}, compiled for {list(shape)} {dtype}",
                    remedy=f"{mend}, or call the StepCompiler, which compiles again",
                )

    def pull(self) -> None:
        """Bring the live model and optimizers up to date; with backends that work in place, nothing is to do."""
        self._lifted.backend.pull()

    def push(self) -> None:
        """Take the state from the live model and optimizers, whatever was written to them and how (`.data` too)."""
        self._lifted.backend.push()


def _absent(lifted: Lifted) -> frozenset[str]:
    gradients = lifted.state.gradients
    return frozenset() if gradients is None else gradients.absent()
