"""A captured step's function within an engine's work: what `around.py` says, for XLA, here and ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from twinstep.worker.compile.around import Around


def with_around(step: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Return `as_jax`'s function within an engine's work: its state and its arguments are two more arguments.

    Results are the step's, without the gradients of activations, then the engine's state and what it made.
    """

    def whole(
        state: list[jax.Array],
        rates: list[jax.Array],
        batch: list[jax.Array],
        constants: list[jax.Array],
        key: jax.Array,
        tables: Any,
        arguments: Any,
    ) -> tuple[Any, ...]:
        def dense(activations: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
            new, outputs, next_key = step(state, rates, [*batch, *activations], constants, key)
            own = len(outputs) - around.given
            return outputs[own:], (new, outputs[:own], next_key)

        tables, made, rest = around.run(dense, tables, arguments)
        return (*rest, tables, made)

    return whole
