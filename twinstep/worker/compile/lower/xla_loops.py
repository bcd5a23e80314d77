"""Repeated layers on XLA: one `jax.lax.scan`, so that XLA compiles a layer once however many there are.

A scan wants what differs from layer to layer stacked. A forward loop leaves what its backward loop needs as stacks
already: those are handed on as they are, and the backward loop runs over them from the last layer to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import torchax

from twinstep.worker.compile.passes.fold_layers import Repeated

RunBody = Callable[[Any, Sequence[jax.Array]], list[jax.Array]]


class Loops:
    """Runs Repeated modules; remembers the stacks of one program.

    Args:
        run_body: runs the body, a graph module, on JAX values.
    """

    def __init__(self, run_body: RunBody) -> None:
        self._run_body = run_body
        self._stacks: dict[tuple[int, ...], tuple[jax.Array, list[jax.Array]]] = {}
        """A stack, by the identities of what lies in it, layer by layer; the values are kept with it."""

    def run(self, loop: Repeated, values: Sequence[jax.Array], *, read: Set[Any]) -> list[jax.Array | None]:
        """Return the outputs of each repeat in turn, None where nobody reads them.

        Args:
            loop: what to run.
            values: its arguments.
            read: positions of the outputs that are read.
        """
        carried, same, each = loop.split(values)
        num_outputs = len(loop.body.graph.output_node().args[0])  # type: ignore[arg-type]
        last = loop.count - 1
        # What is carried out of the last repeat needs no stack where no other repeat's is read.
        stacked = [
            output
            for output in range(num_outputs)
            if any(repeat * num_outputs + output in read for repeat in range(loop.count))
            and not (
                output in loop.carried
                and all(repeat * num_outputs + output not in read for repeat in range(loop.count - 1))
            )
        ]
        columns = list(zip(*each, strict=True))
        backwards = any(_identity(column[::-1]) in self._stacks for column in columns)
        stacks = [self._stack(column[::-1] if backwards else column) for column in columns]
        env = torchax.default_env()

        def body(state: tuple[Any, list[jax.Array]], own: list[jax.Array]) -> Any:
            key, carry = state
            with env.override_property(prng=key):
                found = self._run_body(loop.body, [*carry, *own, *same])
                key = env.prng_key
            return (key, [found[at] for at in loop.carried]), [found[at] for at in stacked]

        start = (env.prng_key, [jnp.asarray(value) for value in carried])
        (key, final), results = jax.lax.scan(body, start, stacks, length=loop.count, reverse=backwards)
        env.prng_key = key
        flat: list[jax.Array | None] = [None] * (loop.count * num_outputs)
        for output, stack in zip(stacked, results, strict=True):
            layers = [stack[at] for at in range(loop.count)]
            self._keep(layers, stack)
            for repeat in range(loop.count):
                flat[repeat * num_outputs + output] = layers[last - repeat if backwards else repeat]
        for output, value in zip(loop.carried, final, strict=True):
            if output not in stacked:
                flat[last * num_outputs + output] = value
        return flat

    def _stack(self, values: Sequence[jax.Array]) -> jax.Array:
        if _identity(values) not in self._stacks:
            self._keep(list(values), jnp.stack(values))
        return self._stacks[_identity(values)][0]

    def _keep(self, values: list[jax.Array], stack: jax.Array) -> None:
        self._stacks[_identity(values)] = (stack, values)


def _identity(values: Sequence[jax.Array]) -> tuple[int, ...]:
    return tuple(map(id, values))
