"""Arrays of an XLA program on one device, or on a mesh of them by the rules of `placement.py`; GSPMD does the rest.

Used by `xla.py` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from twinstep.spec.errors import CompileError
from twinstep.spec.placement import Spec, in_lines, place
from twinstep.worker.compile.annotate import Inputs, Spread
from twinstep.worker.compile.padding import by_rows

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured
    from twinstep.worker.compile.lower.ring_on import RingOn

Specs = tuple[Spec, ...]
LINED = "tpu"
"""The platform on which rows may lie in lines."""


def lines(sharding: Sharding) -> Format:
    """Return a sharding whose rows lie in whole lines of their own, as `placement.in_lines` wants them on a TPU."""
    return Format(Order(major_to_minor=(0, 1)), sharding)


class Layout:
    """Where state, batch and all else live. Without a mesh: on JAX's default device.

    Raises:
        CompileError: the mesh has more devices than there are.
    """

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self.state: Specs = ()
        """Of the state, once a program was lowered or loaded; all programs share it."""
        self.extra: tuple[int, ...] = ()
        """Rows that are added to each tensor of the state, zeros, so that devices divide them."""
        self.lines: tuple[bool, ...] = ()
        """Of each tensor of the state, whether its rows lie in whole lines; empty: none does."""
        self._mesh: Mesh | None = None
        mesh, there = spread.mesh, jax.devices()
        if mesh is None:
            return
        if mesh.size > len(there):
            raise CompileError(
                f"the mesh {mesh} has {mesh.size} devices, JAX sees {len(there)} ({there[0].platform})",
                remedy="take a smaller mesh; on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{mesh.size} before JAX is imported",
            )
        names, lengths = zip(*mesh.axes, strict=True)
        self._mesh = Mesh(np.array(there[: mesh.size]).reshape(lengths), names)

    @property
    def known(self) -> bool:
        """Whether it is known where the state lives: on a mesh, not before the first program."""
        return self._mesh is None or bool(self.state)

    def devices(self) -> list[Any]:
        """Return the devices that programs run on."""
        return jax.devices()[:1] if self._mesh is None else list(self._mesh.devices.flat)

    def learn(self, captured: Captured) -> Specs:
        """Find out where the state of a captured step lives; return where its batch leaves do.

        Raises:
            CompileError: the mesh does not divide the batch.
        """
        if self._mesh is None or self._spread.mesh is None:
            return ()
        placed = Inputs.of(captured, self._spread).placed
        found = place(placed, self._spread.mesh)
        if not self.state:
            self.state, self.extra = found.specs[: captured.num_state], found.extra[: captured.num_state]
            if self.devices()[0].platform == LINED:
                self.lines = tuple(map(in_lines, placed[: captured.num_state]))
        return found.specs[captured.num_state :]

    def take(self, state: Specs, extra: tuple[int, ...], in_lines: tuple[bool, ...] = ()) -> None:
        """Place the state as a program from disk wants it.

        Raises:
            CompileError: a program was there before that placed it in another way.
        """
        if self.state and (self.state, self.extra, self.lines) != (state, extra, in_lines):
            raise CompileError("the program places the state otherwise", remedy="it is compiled again")
        self.state, self.extra, self.lines = state, extra, in_lines

    def hold(self, arrays: Iterable[jax.Array], first: int = 0) -> list[jax.Array]:
        """Bring tensors of the state, from slot `first` on, to where they live, with the rows that are added."""
        if self._mesh is None:
            return list(arrays)
        padded = [add_rows(array, self.extra[slot]) for slot, array in enumerate(arrays, first)]
        return [self._put(array, self._slot(first + at)) for at, array in enumerate(padded)]

    def splits(self, slot: int) -> bool:
        """Say whether a tensor of the state is split along its rows."""
        return bool(self.state and self.state[slot] and self.state[slot][0] is not None)

    def hold_rows(self, slot: int, shape: tuple[int, ...], rows: Callable[[int, int], np.ndarray]) -> jax.Array:
        """Bring a tensor that is split along its rows to where it lives, one device's part after the other.

        Args:
            slot: which of the state.
            shape: of the tensor, without the rows that are added.
            rows: gives values of rows, from the first to the one after the last; asked for this process's own.
        """
        whole = (shape[0] + self.extra[slot], *shape[1:])
        sharding = self._sharding(self.state[slot])
        parts, of_devices = [], dict[Any, Any](sharding.addressable_devices_indices_map(whole))
        for device, index in of_devices.items():
            start, stop, _ = index[0].indices(whole[0])
            values = rows(min(start, shape[0]), min(stop, shape[0]))[(slice(None), *index[1:])]
            missing = stop - start - len(values)
            if missing:
                values = np.pad(values, [(0, missing)] + [(0, 0)] * (len(shape) - 1))
            # A copy always, as in `xla.py`; waited for, so that the host holds one part at a time.
            there = self._as_it_lies(slot, SingleDeviceSharding(device))
            parts.append(jax.device_put(values, there, may_alias=False).block_until_ready())
        return jax.make_array_from_single_device_arrays(whole, sharding, parts)

    def padded(self, slot: int) -> bool:
        """Say whether a tensor of the state has rows that were added."""
        return bool(self.extra and self.extra[slot])

    def hidden(self, captured: Captured) -> dict[int, int]:
        """Return rows added to slots that a step must not see: it reads or writes more than rows by id."""
        if not any(self.extra):
            return {}
        alone = by_rows(captured.graph, captured.num_state)
        return {slot: extra for slot, extra in enumerate(self.extra) if extra and not alone[slot]}

    def ring(self, captured: Captured) -> RingOn | None:
        """Return the ring that a step's tables go around; None: it asks for none, or runs on one device.

        Raises:
            CompileError: a table that was named for it is not split by rows.
        """
        from twinstep.worker.compile.lower.ring_on import RingOn  # with torchax, which lowering alone wants

        return RingOn.of(captured, self._mesh, self.state, self.lines)

    def put(self, arrays: Iterable[jax.Array], specs: Specs) -> list[jax.Array]:
        """Bring arrays to where they live."""
        if self._mesh is None:
            return list(arrays)
        return [self._put(array, self._sharding(spec)) for array, spec in zip(arrays, specs, strict=True)]

    def everywhere(self, array: jax.Array) -> jax.Array:
        """Bring an array to every device."""
        return array if self._mesh is None else self._put(array, self._sharding(()))

    def _put(self, array: Any, sharding: Sharding | Format) -> Any:
        if not several():
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            words = np.asarray(jax.random.key_data(array))
            return jax.random.wrap_key_data(self._put(words, sharding))
        whole = np.asarray(array)  # each process has all of it, and brings its devices' part
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def whole(self, array: jax.Array) -> Any:
        """Return an array that this process can read; where other processes hold parts, all must ask."""
        if array.is_fully_addressable or array.is_fully_replicated:
            return array
        return jax.jit(lambda x: x, out_shardings=self._sharding(()))(array)

    def results(self) -> Any:
        """Return where a program's results live, for `jax.jit`: new state where the old is, outputs wherever."""
        if self._mesh is None:
            return None
        outputs = self._sharding(()) if several() else None  # each process reads them
        return [self._slot(slot) for slot in range(len(self.state))], outputs, self._sharding(())

    def _slot(self, slot: int) -> Sharding | Format:
        """Return where a tensor of the state lives, and how."""
        return self._as_it_lies(slot, self._sharding(self.state[slot]))

    def _as_it_lies(self, slot: int, sharding: Sharding) -> Sharding | Format:
        return lines(sharding) if self.lines and self.lines[slot] else sharding

    def _sharding(self, spec: Spec) -> NamedSharding:
        assert self._mesh is not None, "only arrays on a mesh have a sharding"  # noqa: S101
        return NamedSharding(self._mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]


def several() -> bool:
    """Say whether other processes compute with this one."""
    return bool(jax.process_count() > 1)


def add_rows(array: jax.Array, extra: int) -> jax.Array:
    """Return an array with `extra` rows of zeros at its end."""
    return jnp.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1)) if extra else array


def rows_held(array: jax.Array, rows: int) -> list[tuple[int, int, int]] | None:
    """Return who has which of an array's first `rows` rows: first row, the one after the last, process.

    None: this process can read all of it, or it is split by something else than rows.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return None
    found: dict[tuple[int, int], int] = {}
    for each, index in array.sharding.devices_indices_map(array.shape).items():
        device: Any = each
        whole = all(part.indices(size)[:2] == (0, size) for part, size in zip(index[1:], array.shape[1:], strict=True))
        if not whole:
            return None
        start, stop, _ = index[0].indices(array.shape[0])
        found[start, stop] = min(device.process_index, found.get((start, stop), device.process_index))
    kept = ((start, min(stop, rows), process) for (start, stop), process in sorted(found.items()))
    return [each for each in kept if each[0] < each[1]]


def rows_here(array: jax.Array, rows: int, ids: np.ndarray) -> np.ndarray:
    """Return values of some of an array's first `rows` rows, zeros for those that other processes give.

    Args:
        array: split by rows, as `rows_held` says.
        ids: [n] int64, in range.
    """
    found = np.zeros((len(ids), *array.shape[1:]), array.dtype)
    held = rows_held(array, rows) or []
    mine = {start for start, _, process in held if process == jax.process_index()}
    for start, stop, part in own_rows(array, rows):
        if start in mine:
            mine.discard(start)
            here = np.flatnonzero((ids >= start) & (ids < stop))
            found[here] = taken(part, ids[here] - start)
    return found


def taken(part: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Return rows of one device's part; few sizes are compiled."""
    size = 1 << max(0, len(rows) - 1).bit_length()
    padded = np.zeros(size, np.int32)
    padded[: len(rows)] = rows
    return np.asarray(jnp.take(part, padded, axis=0, mode="clip"))[: len(rows)]


def own_rows(array: jax.Array, rows: int) -> Iterator[tuple[int, int, jax.Array]]:
    """Yield first row, the one after the last, and values of what of `rows_held` this process can read."""
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(array.shape[0])
        if start < rows:
            yield start, min(stop, rows), shard.data
