"""What a backend is to the rest of the compiler: it lowers captured steps, holds their state, carries them over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from twinstep.worker.compile.accumulation import Left

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured

Collect = Callable[[], list[Tensor]]
"""Waits for a step that was started, and returns the user's outputs, flat; called once."""


class Program(Protocol):
    """What a backend makes of a captured step."""

    from_cache: bool
    """Whether a cache answered, the backend's own included."""

    def start(self, rates: Sequence[Tensor], batch: Sequence[Tensor]) -> Collect:
        """Start one step; the next may be started before this one's outputs are asked for."""

    def text(self) -> str:
        """Return the program as text, as the backend has it."""


RowsHeld = dict[str, list[tuple[int, int, int]]]
"""By path, of tensors that no process has whole: first row, the one after the last, and the process that has them."""


class Backend(Protocol):
    """What lowers captured steps and owns their state between steps."""

    name: str
    wraps_indices: bool
    """Whether an index that names no row takes another row, or NaN, in silence: it is then checked before the step."""

    def decompositions(self) -> dict[Any, Callable[..., Any]]: ...

    def lower(self, captured: Captured) -> Program: ...

    def save(self, program: Any) -> dict[str, bytes] | None:
        """Return the parts that `load` makes the program of in another process; None: it cannot be restored."""

    def load(self, parts: Mapping[str, bytes], constants: Sequence[Tensor]) -> Program:
        """Return the program that `save` made parts of; any exception means that it must be compiled."""

    def pull(self) -> None: ...

    def pull_own(self) -> RowsHeld:
        """As `pull`; of tensors that no process has whole, bring this one's rows alone, and say who has which."""

    def pull_rest(self) -> RowsHeld:
        """As `pull_own`, but bring nothing of tensors that no process has whole: `rows_here` gives rows of them."""

    def rows_here(self, path: str, ids: Any) -> Any:
        """Return rows of a tensor that `pull_rest` named, [n, …]; zeros for those that other processes give."""

    def push(self) -> None: ...

    def value(self, slot: int) -> Tensor:
        """Return a tensor of the state as the last step left it, on the host with XLA; waits for that step."""

    def leave_gradients(self, left: Left) -> None:
        """Set what a step left in `.grad`."""

    def random_state(self) -> Tensor:
        """Return where random numbers stand, for a checkpoint."""

    def set_random_state(self, state: Tensor) -> None:
        """Go on from what `random_state` gave."""

    def go_on_from(self, before: Any) -> None: ...
