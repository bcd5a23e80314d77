"""Work in a step's program that no captured graph holds: what an embedding engine does before the step and after it.

The captured step takes activations as the last leaves of its batch and gives their gradients as the last of its
outputs; tables are none of its state. `Around.run` calls it in the midst of its own work, within one program, so that
tables are donated with the rest of the state and nothing goes through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Dense = Callable[[Sequence[Any]], tuple[list[Any], Any]]
"""Activations → their gradients, and what else the captured step gives."""
KeyPart = tuple[tuple[str, str], ...]


class Around(Protocol):
    """State and work of an engine; arrays are the backend's."""

    given: int
    """Leaves at the end of the batch that are made on the devices, and outputs at the end that stay there."""
    state: Any
    """Arrays that a step donates and gives back: tables and what optimizers keep of rows."""

    @property
    def key(self) -> KeyPart:
        """What a CompileKey holds of it: all that decides its part of the program, by name."""

    @property
    def arguments(self) -> Any:
        """Arrays of the batch that the next step is for."""

    @property
    def placing(self) -> Any:
        """Where state lives, for `jax.jit`."""

    def run(self, dense: Dense, state: Any, arguments: Any) -> tuple[Any, Any, Any]:
        """Return new state, what was made beside it, and the captured step's rest; traced."""

    def took(self, state: Any, made: Any) -> None:
        """Take over a step's new state, and what it made, when it was started."""

    def check(self) -> None:
        """Raise what a finished step found wrong. Waits for the device."""

    def pull(self) -> None:
        """Bring the live tables and slots up to date."""

    def pull_own(self) -> None:
        """Bring up to date at least the rows of them that this process is to save."""

    def settle(self) -> None:
        """Let the state be that after all batches so far."""

    def push(self) -> None:
        """Take state from the live tables and slots."""

    def push_written(self) -> None:
        """Take state from live tables and slots that were written to since the last pull or push."""
