"""What would make a spec fit: single changes, each put into the spec and tried by the model; nearest first.

Kinds of change stand in the order of what they leave as it is: more devices and another engine change no number of the
training, a wider format few, a smaller batch or table what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from time import thread_time
from typing import Any, get_args

from pydantic import ValidationError

from twinstep.preflight.chips import where
from twinstep.preflight.report import Change
from twinstep.preflight.shapes import data_shape
from twinstep.spec.accelerator import GpuSpec, TpuSpec
from twinstep.spec.devices import shares_of
from twinstep.spec.job import JobSpec
from twinstep.spec.topology import GPUS, chips_of, host_sizes, topologies

Tried = Callable[[JobSpec], int | None]
"""Returns the bytes of a device where a spec fits, None where it does not."""
Fields = dict[str, Any]


class SpentError(Exception):
    """No further spec may be tried."""


class Budget:
    """A model that may be asked so many times, and for so long; a refusal is not to hold up everybody else.

    Args:
        clock: seconds; None: of the thread's processor time, for what others do is no reason to offer less.
    """

    def __init__(
        self,
        tried: Tried,
        *,
        calls: int,
        seconds: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._tried, self._left, self._clock = tried, calls, clock or thread_time
        self._end = None if seconds is None else self._clock() + seconds

    def __call__(self, spec: JobSpec) -> int | None:
        """Return what the model says; raise SpentError where it may not be asked."""
        if not self._left or (self._end is not None and self._clock() >= self._end):
            raise SpentError
        self._left -= 1
        return self._tried(spec)


def changes_for(spec: JobSpec, tried: Tried, *, activations: int = 0) -> tuple[Change, ...]:
    """Return single changes with which a spec fits; those that were found, where `tried` is spent.

    Args:
        activations: bytes of a device that values and scores take, which the backward pass reads.
    """
    found: list[Change] = []
    kinds = (
        partial(_budget, activations=activations), _larger_slice, _more_gpus, _engine,
        _serialised, _batch, _optimizer, _rows,
    )  # fmt: skip
    with suppress(SpentError):
        for kind in kinds:
            for change in kind(spec, tried):
                found += [] if change is None else [change]
    return tuple({str(change.fields): change for change in found}.values())


def with_fields(spec: JobSpec, fields: Fields) -> JobSpec | None:
    """Return a spec with fields set by path; None where it is then none."""
    dumped = spec.model_dump()
    for path, value in fields.items():
        part = dumped
        *way, last = path.split(".")
        for name in way:
            part = part[name]
        part[last] = value
    try:
        return JobSpec.model_validate(dumped)
    except ValidationError:
        return None


def _try(spec: JobSpec, tried: Tried, text: str, fields: Fields) -> Change | None:
    changed = with_fields(spec, fields)
    found = None if changed is None else tried(changed)
    return None if found is None else Change(text, fields, found)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest number of low..high that fits, where all below one that fits do too; None: not even `low`."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _set(spec: JobSpec, tried: Tried, path: str, values: Callable[..., Any]) -> Callable[[int], bool]:
    def fits(number: int) -> bool:
        changed = with_fields(spec, {path: values(number)})
        return changed is not None and tried(changed) is not None

    return fits


def _budget(spec: JobSpec, tried: Tried, *, activations: int) -> Iterator[Change | None]:
    """Yield the largest budget of values with which a spec fits; one of less than a few of them cannot be met."""
    path, most = "compile.memory_budget_mib", activations >> 20
    found = _largest(most // LEAST_KEPT, most - 1, _set(spec, tried, path, int)) if most >= LEAST_KEPT else None
    if found is not None:
        yield _try(spec, tried, f"{path}: {found}, other values computed again", {path: found})


LEAST_KEPT = 4  # activations over the least budget of them that is offered: a compiler may not meet a smaller one


def _batch(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    devices, path = where(spec).devices, "data.batch_size"
    shares = shares_of(spec.accelerator, spec.embedding.engine)
    most = (spec.data.batch_size - 1) // shares
    found = _largest(1, most, _set(spec, tried, path, lambda rows: rows * shares))
    if found is not None:
        size, now = found * shares, spec.data.batch_size
        said = f"data.batch_size: {size}, {size // devices} rows a device instead of {now / devices:g}"
        yield _try(spec, tried, said, {path: size})


def _larger_slice(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    asked = spec.accelerator
    if not isinstance(asked, TpuSpec):
        return
    now = chips_of(asked.topology)
    larger = [each for each in topologies(asked.generation, up_to=None) if chips_of(each) > now]
    by_chips = {chips_of(each): each for each in reversed(larger)}  # of one size the first is the most compact
    each = shares_of(asked, spec.embedding.engine) // now  # of the batch, for a chip of every slice
    counts = sorted(count for count in by_chips if spec.data.batch_size % (count * each) == 0)
    low, high = 0, len(counts)
    found: tuple[str, Fields] | None = None
    while low < high:
        middle = (low + high) // 2
        topology = by_chips[counts[middle]]
        fields = _slice(asked, topology)
        changed = with_fields(spec, fields)
        if changed is not None and tried(changed) is not None:
            found, high = (topology, fields), middle
        else:
            low = middle + 1
    if found is not None:
        said = f"accelerator.topology: {found[0]}, {chips_of(found[0])} chips a slice instead of {now}"
        yield _try(spec, tried, said, found[1])


def _slice(asked: TpuSpec, topology: str) -> Fields:
    sizes = host_sizes(asked.generation, topology)
    return {
        "accelerator": {
            **asked.model_dump(), "topology": topology, "chips_per_host": sizes[-1] if len(sizes) > 1 else None,
        }
    }  # fmt: skip


def _more_gpus(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    asked = spec.accelerator
    if not isinstance(asked, GpuSpec):
        return
    node = GPUS[asked.model].per_node
    counts = [size for size in (2, 4, *(node << power for power in range(9))) if size > asked.count]
    engine: Fields = {} if spec.embedding.engine == "torchrec" else {"embedding.engine": "torchrec"}
    for count in counts:
        more = ", and embedding.engine: torchrec" if engine else ""
        said = f"accelerator.count: {count}, instead of {asked.count}{more}"
        change = _try(spec, tried, said, {"accelerator.count": count, **engine})
        if change is not None:
            yield change
            return


def _engine(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    for engine in get_args(type(spec.embedding).model_fields["engine"].annotation):
        if engine != spec.embedding.engine:
            yield _try(spec, tried, f"embedding.engine: {engine}", {"embedding.engine": engine})
    if isinstance(spec.accelerator, GpuSpec) and spec.embedding.engine != "torchrec":
        said = "embedding.engine: torchrec, and optimizers.sparse.kind: rowwise_adagrad"
        lighter = {"kind": "rowwise_adagrad", "lr": spec.optimizers.sparse.lr}
        yield _try(spec, tried, said, {"embedding.engine": "torchrec", "optimizers.sparse": lighter})


def _serialised(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    engine: str = spec.embedding.engine
    if engine != "sparsecore":
        return
    flags = {} if spec.embedding.sparsecore is None else spec.embedding.sparsecore.model_dump()
    if not flags.get("serialized_tables"):
        count = len(data_shape(spec.data).tables)
        yield _try(
            spec, tried, f"embedding.sparsecore.serialized_tables: {count}",
            {"embedding.sparsecore": {**flags, "serialized_tables": count}},
        )  # fmt: skip


def _optimizer(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    if spec.optimizers.sparse.kind != "rowwise_adagrad":
        lighter = {"kind": "rowwise_adagrad", "lr": spec.optimizers.sparse.lr}
        yield _try(
            spec, tried, "optimizers.sparse.kind: rowwise_adagrad, which keeps one number a row",
            {"optimizers.sparse": lighter},
        )  # fmt: skip


def _rows(spec: JobSpec, tried: Tried) -> Iterator[Change | None]:
    """Yield fewer rows of the largest table that has as many as the spec says."""
    for path, part in (("data.rows", "rows"), ("data.hash_rows", "hash_rows")):
        asked: dict[str, int] = getattr(spec.data, part)
        named = [table for table in data_shape(spec.data).tables if table.name in asked]
        if not named:
            continue
        table = max(named, key=lambda each: each.rows)
        without = {name: rows for name, rows in asked.items() if name != table.name}
        own = data_shape(spec.data.model_copy(update={part: without})) if part == "rows" else None
        least = 1 if own is None else next(each.rows for each in own.tables if each.name == table.name)
        one_less = _set(spec, tried, path, lambda rows, name=table.name, all_=asked: {**all_, name: rows})
        found = _largest(max(least, 1), table.rows - 1, one_less)
        if found is not None:
            said = f"{path}.{table.name}: {found:,} rows at most, instead of {table.rows:,}"
            yield _try(spec, tried, said, {path: {**asked, table.name: found}})
