"""Ids are checked before a step: what makes them of the batch is cut out of its graph, and computed on its own.

A program may not find out on its way that an id names no row: XLA reads another row or NaN in silence, and its state is
given away by then. So of each lookup of a captured step (an embedding, `weight[ids]`, a gather, the classes of a cross
entropy) the indices are followed back to where they come from:

- what is within the table by its making (`% rows`, a clamp, an argmax; `ranges.py`) needs no check;
- what is made of leaves of the batch, of constants and of small buffers is computed by PyTorch before the step, by the
  same few integer ops, and held against the table;
- what is made of parameters, or drawn at random, is known to the program alone. Inductor's code checks it; for XLA the
  step is refused, with the line.

XLA programs hold integers in 32 bits: products of ids that could be longer (a hash) are computed and checked as well.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx

from twinstep.spec.errors import CompileError, DataError
from twinstep.worker.compile.lookups import FROM_END, FROM_START, indices, written
from twinstep.worker.compile.ranges import Ranges
from twinstep.worker.compile.stages import place

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured
    from twinstep.worker.compile.lifted import Lifted

aten = torch.ops.aten
INT32 = torch.iinfo(torch.int32)
LARGEST = 1 << 20  # bytes of a buffer that ids are made of; it is read before each step that changes it
REMEDY = "map ids into the table's rows, or make the table larger; the state is as it was before the step"


_OF_CLASSES = {"nll_loss", "nll_loss2d", "multi_margin_loss", "one_hot"}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a guard, by number, where an op takes it."""

    number: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a guard."""

    name: str
    """As torch names it, `aten.add.Tensor`, or `getitem`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """What goes into a guard: a leaf of the batch, a slot of the state that `moves` with steps or not, a constant."""

    kind: Literal["leaf", "state", "constant"]
    index: int
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Bounds of one value of a guard."""

    value: int
    op: str
    """What looks rows up; empty: a product that must fit into 32 bits."""
    leaves: tuple[int, ...]
    """Leaves of the batch that the value is made of, by position."""
    as_it_is: bool
    """Whether it is a leaf with other dimensions at most."""
    low: int
    """Least index allowed: negative where the op counts from the end."""
    rows: int
    """Indices must be below it."""
    place: str
    """The user's line, ` at FILE:LINE: source`."""
    missed: bool
    """Whether a program that checks indices itself would pass over this one, and take another row."""

    def hold(self, values: Tensor, paths: Sequence[str]) -> None:
        """Raise DataError if a value is out of bounds."""
        if not values.numel():
            return
        least, most = (int(each) for each in torch.aminmax(values))
        if least >= self.low and most < self.rows:
            return
        held = f"{least}…{most}"
        if not self.op:
            raise DataError(
                f"ids that the step computes{self._origin(paths)} reach {held}{self.place}; XLA programs hold integers "
                "in 32 bits",
                remedy="compute them where batches are made, as 64-bit integers, or set compile.backend: inductor; "
                "the state is as it was before the step",
            )
        whose = f"batch leaf {paths[self.leaves[0]]} holds" if self.as_it_is else f"ids{self._origin(paths)} are"
        if self.op in _OF_CLASSES:
            problem = f"{whose} {held}, and {self.op} takes classes {self.low}…{self.rows - 1}{self.place}"
            raise DataError(problem, remedy=f"give classes below {self.rows}; the state is as it was before the step")
        problem = f"{whose} {held}, and {self.op} looks up rows {self.low}…{self.rows - 1}{self.place}"
        raise DataError(problem, remedy=REMEDY)

    def _origin(self, paths: Sequence[str]) -> str:
        named = ", ".join(paths[each] for each in self.leaves[:3])
        more = ", …" if len(self.leaves) > 3 else ""
        return f" made of batch leaf {named}{more}" if named else " made of no leaf of the batch"


@dataclass(frozen=True, slots=True)
class Guard:
    """What is checked before a step, as data that a cache can keep."""

    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    checks: tuple[Check, ...]
    written: tuple[int, ...]
    """Slots of integers that the step writes."""


def guard(captured: Captured) -> Guard:
    """Return the guard of a captured step.

    Raises:
        CompileError: it is for XLA, and a lookup's rows are known only within the program.
    """
    return _Cutter(captured).cut()


class _Cutter:
    """Cuts a guard out of a graph."""

    def __init__(self, captured: Captured) -> None:
        self._graph = captured.graph.graph
        self._placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._num_state, self._first_leaf = captured.num_state, captured.num_state + captured.num_rates
        self._first_constant = self._first_leaf + captured.num_batch
        self._is_xla = captured.context.backend == "xla"
        self._ranges = Ranges(*((INT32.min, INT32.max) if self._is_xla else ()))
        new_state: Any = self._graph.output_node().args[0]
        state = zip(new_state[: self._num_state], self._placeholders, strict=False)
        self._unchanged = {old for new, old in state if new is old}
        self._sources: dict[fx.Node, Source] = {}
        self._looked_up: list[fx.Node] = []
        self._known: dict[fx.Node, bool] = {}
        """Whether a value can be computed before the step."""

    def cut(self) -> Guard:
        """Return the guard."""
        wanted: dict[fx.Node, list[Check]] = {}
        for node in self._graph.nodes:
            for index, low, rows in indices(node):
                self._want(node, index, low, rows, wanted)
        if self._is_xla:
            for node in self._made_of(self._looked_up):
                self._want_short(node, wanted)
        return self._guard(wanted)

    def _want(self, node: fx.Node, index: fx.Node, low: int, rows: int, wanted: dict[fx.Node, list[Check]]) -> None:
        by = written(node)
        if by and by not in FROM_START | FROM_END:
            return  # of a decomposition that makes its indices itself
        source = _same_values(index)
        while by == "embedding_dense_backward" and source.op == "call_function" and written(source) == by:
            source = _same_values(source.all_input_nodes[0])  # bounded by the gradient's decomposition, not by the step
        self._looked_up.append(source)
        least, most = self._ranges[source]
        if least >= low and most < rows:
            return
        if not self._is_known(source):
            if by and self._is_xla:
                self._refuse(node, low, rows)
            return
        name = by.strip("_").removesuffix("_forward") or str(node.target).removeprefix("aten.").removesuffix(".default")
        missed = low == 0 and node.target in (aten.index.Tensor, aten.index_put.default, aten.eq.Tensor)
        leaves, as_it_is = self._leaves(source), source.op == "placeholder"
        checks = wanted.setdefault(source, [])
        for number, each in enumerate(checks):
            if each.low >= low and each.rows <= rows:  # the first to say it is the forward pass
                checks[number] = replace(each, missed=each.missed or missed)
                return
        checks.append(Check(0, name, leaves, as_it_is and bool(leaves), low, rows, place(node), missed))

    def _want_short(self, node: fx.Node, wanted: dict[fx.Node, list[Check]]) -> None:
        packet = getattr(node.target, "overloadpacket", None)
        value = node.meta.get("val")
        if packet in _GROW and isinstance(value, Tensor) and value.dtype is torch.int64:
            least, most = self._ranges[node]
            if (least < INT32.min or most > INT32.max) and self._is_known(node):
                check = Check(0, "", self._leaves(node), False, INT32.min, INT32.max + 1, place(node), missed=False)
                wanted.setdefault(node, []).append(check)

    def _refuse(self, node: fx.Node, low: int, rows: int) -> None:
        raise CompileError(
            f"which rows {written(node)} reads{place(node)} is computed from parameters or random numbers, and "
            f"nothing bounds it; XLA would take another row, or NaN, for an id outside of {low}…{rows - 1}",
            remedy=f"bound the ids: ids.clamp(0, {rows - 1}), ids % {rows}, torch.randint; or set compile.backend: "
            "inductor, which checks them as it runs",
        )

    def _is_known(self, node: fx.Node) -> bool:
        for each in self._made_of([node]):
            if each not in self._known:
                inputs = each.all_input_nodes
                self._known[each] = self._is_given(each) if each.op == "placeholder" else (
                    _can_run(each) and all(self._known[one] for one in inputs)
                )  # fmt: skip
        return self._known[node]

    def _is_given(self, node: fx.Node) -> bool:
        number = self._placeholders.index(node)
        if number >= self._first_constant:
            self._sources[node] = Source("constant", number - self._first_constant)
        elif number >= self._first_leaf:
            self._sources[node] = Source("leaf", number - self._first_leaf)
        elif number < self._num_state:
            value = node.meta["val"]
            is_still = node in self._unchanged
            if value.numel() * value.element_size() > LARGEST or not (is_still or not value.dtype.is_floating_point):
                return False
            self._sources[node] = Source("state", number, not is_still)
        return node in self._sources

    def _made_of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes that some are made of, and they, in the order of the graph."""
        found, waiting = set(nodes), list(nodes)
        while waiting:
            more = [each for each in waiting.pop().all_input_nodes if each not in found]
            found.update(more)
            waiting += more
        return sorted(found)

    def _leaves(self, node: fx.Node) -> tuple[int, ...]:
        """Return the leaves whose values are the ids', not those that only say which ids are meant."""
        for chosen in (_flows, lambda node: node.all_input_nodes):
            found, waiting = {node}, [node]
            while waiting:
                more = [each for each in chosen(waiting.pop()) if each not in found]
                found.update(more)
                waiting += more
            sources = [self._sources[each] for each in sorted(found) if each in self._sources]
            if leaves := tuple(each.index for each in sources if each.kind == "leaf"):
                return leaves
        return ()

    def _guard(self, wanted: dict[fx.Node, list[Check]]) -> Guard:
        nodes = self._made_of(list(wanted))
        given = [node for node in nodes if node.op == "placeholder"]
        made = [node for node in nodes if node.op != "placeholder"]
        numbers = {node: Value(number) for number, node in enumerate([*given, *made])}

        def arguments(of: Any) -> Any:
            return fx.map_arg(of, lambda node: numbers[node])  # type: ignore[arg-type, return-value]

        ops = tuple(Op(_named(node), _plain(arguments(node.args)), _plain(arguments(node.kwargs))) for node in made)
        checks = tuple(
            Check(numbers[node].number, *(getattr(check, name) for name in Check.__slots__[1:]))
            for node in nodes
            for check in wanted.get(node, ())
        )
        slots = enumerate(self._placeholders[: self._num_state])
        written = tuple(
            slot for slot, old in slots if old not in self._unchanged and not old.meta["val"].dtype.is_floating_point
        )
        return Guard(tuple(self._sources[node] for node in given), ops, checks, written)


def _plain(values: Any) -> Any:
    """Return fx's immutable lists and dicts as plain ones."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return (list if isinstance(values, list) else tuple)(_plain(each) for each in values)
    return values


def _named(node: fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target)


def _can_run(node: fx.Node) -> bool:
    """Whether a node is an op that gives the same result outside of the program."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    is_known = target.namespace in ("aten", "prims") or target.overloadpacket is torch.ops.twinstep.unique_rows
    return is_known and torch.Tag.nondeterministic_seeded not in target.tags


def _flows(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node whose numbers its own are made of."""
    packet = getattr(node.target, "overloadpacket", None)
    values: Any = node.args
    if packet is aten.where:
        values = node.args[1:]
    elif packet in (aten.masked_fill, aten.gather, aten.index, aten.index_select, aten._unsafe_index):
        values = node.args[:1]
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def _same_values(node: fx.Node) -> fx.Node:
    """Follow an index tensor back through ops that change no value of it and leave none out."""
    while (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.overloadpacket in _SAME_VALUES
        and not node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
        and node.meta["val"].dtype.itemsize >= node.args[0].meta["val"].dtype.itemsize  # type: ignore[union-attr]
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


_SAME_VALUES = {
    aten.view,
    aten.reshape,
    aten._unsafe_view,
    aten.unsqueeze,
    aten.squeeze,
    aten.permute,
    aten.transpose,
    aten.t,
    aten.expand,
    aten.clone,
    aten.alias,
    aten.detach,
    aten._to_copy,
    torch.ops.prims.convert_element_type,
}
"""Ops whose result holds all values of their first argument and no others, if it is as wide."""
_GROW = {aten.mul, aten.pow, aten.bitwise_left_shift, aten.__lshift__}
"""Ops on integers whose result may be much longer than they are."""


class Guarding:
    """Checks batches by a guard before steps.

    Args:
        guard: of the step.
        constants: the step's, in order.
        lifted: where state is.
        paths: of the batch's leaves.
    """

    def __init__(self, guard: Guard, constants: Sequence[Tensor], lifted: Lifted, paths: Sequence[str]) -> None:
        self._lifted, self._constants, self._paths = lifted, constants, paths
        lifted.written.update(guard.written)
        self._guard = guard
        self._before = _Plan(guard, [each for each in guard.checks if lifted.backend.wraps_indices or each.missed])
        self._every: _Plan | None = None

    def check(self, leaves: Sequence[Tensor]) -> None:
        """Raise DataError if the batch makes an id that the program would take another row, or NaN, for."""
        if self._before.checks:
            self._run(self._before, leaves)

    def explain(self, error: Exception, leaves: Sequence[Tensor]) -> None:
        """Raise DataError for an error of a program that a lookup failed; return where it is about something else."""
        if not isinstance(error, RuntimeError | IndexError) or not _OUT_OF_BOUNDS.search(str(error)):
            return
        self._every = self._every or _Plan(self._guard, self._guard.checks)
        self._run(self._every, leaves)
        line = str(error).strip().splitlines()[0][:200]
        raise DataError(f"the step looks up a row that is not there: {line}", remedy=REMEDY) from error

    def _run(self, plan: _Plan, leaves: Sequence[Tensor]) -> None:
        if any(each.kind == "leaf" and each.index >= len(leaves) for each in plan.sources.values()):
            return  # made of what the program gives itself
        values: dict[int, Any] = {}
        stands: list[Any] = []
        """Tensors that do not come with the batch, and their versions."""
        for number, source in plan.sources.items():
            values[number] = leaves[source.index] if source.kind == "leaf" else self._standing(source)
            if source.kind != "leaf":
                stands += [values[number], values[number]._version]
        plan.run(values, stands, self._paths)

    def _standing(self, source: Source) -> Tensor:
        if source.kind == "constant":
            return self._constants[source.index]
        if source.moves or source.index in self._lifted.written:
            return self._lifted.backend.value(source.index)
        return self._lifted.state.live()[source.index].detach()


Run = Callable[[dict[int, Any]], Any]
_OUT_OF_BOUNDS = re.compile(r"out of (bounds|range)|index_out_of|valid range", re.IGNORECASE)


class _Plan:
    """Some checks of a guard, and the ops they want: those that no leaf of the batch goes into are run once."""

    def __init__(self, guard: Guard, checks: Sequence[Check]) -> None:
        self.checks = checks
        start = len(guard.sources)
        needed = {each.value for each in checks}
        for number in range(start + len(guard.ops) - 1, start - 1, -1):
            if number in needed:
                needed.update(_numbers(guard.ops[number - start]))
        self.sources = {number: each for number, each in enumerate(guard.sources) if number in needed}
        of_batch = {number for number, each in self.sources.items() if each.kind == "leaf"}
        self._once: list[tuple[int, Run]] = []
        self._each: list[tuple[int, Run]] = []
        for number, op in enumerate(guard.ops, start):
            if number in needed:
                moves = not of_batch.isdisjoint(_numbers(op))
                of_batch |= {number} if moves else set()
                (self._each if moves else self._once).append((number, _run(op)))
        self._of_batch = of_batch
        self._stood: list[Any] | None = None
        self._found: dict[int, Any] = {}

    def run(self, values: dict[int, Any], stands: list[Any], paths: Sequence[str]) -> None:
        """Compute and check."""
        with torch.no_grad():
            first = self._stood is None or not _same_objects(self._stood, stands)
            if first:
                self._found = {number: each for number, each in values.items() if number not in self._of_batch}
                _compute(self._once, self._found)
            values |= self._found
            _compute(self._each, values)
            for check in self.checks:
                if first or check.value in self._of_batch:
                    check.hold(values[check.value], paths)
            self._stood = stands


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (isinstance(one, int) and one == other) for one, other in zip(some, others, strict=True)
    )


def _compute(ops: Sequence[tuple[int, Run]], values: dict[int, Any]) -> None:
    for number, run in ops:
        values[number] = run(values)


def _run(op: Op) -> Run:
    """Return what runs an op on the values there are, with as little Python as there can be: it is there each step."""
    function, kwargs = _callable(op.name), op.kwargs
    spots = [(at, each.number) for at, each in enumerate(op.args) if isinstance(each, Value)]
    if len(_numbers(op)) > len(spots):
        return lambda values: function(*_filled(op.args, values), **_filled(kwargs, values))

    def run(values: dict[int, Any]) -> Any:
        args = list(op.args)
        for at, number in spots:
            args[at] = values[number]
        return function(*args, **kwargs)

    return run


def _filled(arguments: Any, values: dict[int, Any]) -> Any:
    if isinstance(arguments, Value):
        return values[arguments.number]
    if isinstance(arguments, list | tuple):
        return [_filled(each, values) for each in arguments]
    if isinstance(arguments, dict):
        return {name: _filled(each, values) for name, each in arguments.items()}
    return arguments


def _numbers(op: Op) -> list[int]:
    found: list[int] = []

    def look(value: Any) -> None:
        if isinstance(value, Value):
            found.append(value.number)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            look(each)

    look((op.args, op.kwargs))
    return found


def _callable(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    if name == "prims.convert_element_type.default":  # torch's own takes ten times as long
        return lambda values, dtype: values.to(dtype)
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
