"""A graph with folded layers as pieces for Inductor: the stretches between the loops, and each loop's body once.

A schedule says in which order the pieces run and where each value goes. The body of L equal layers is one piece that
is called L times, so that compile time does not grow with L.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from twinstep.worker.compile.passes.fold_layers import Repeated

Code = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled piece: takes its inputs in a list, which it empties, and returns its outputs."""

_UNREAD = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a piece. Values have numbers: first the graph's inputs, then what calls give."""

    piece: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    """Number of each result; -1: nobody reads it."""
    done: tuple[int, ...] = ()
    """Values that nobody reads after this call."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The calls in order."""

    calls: tuple[Call, ...]
    returns: tuple[int, ...]
    """Values that are the graph's outputs."""

    def as_json(self) -> dict[str, Any]:
        """Return the schedule as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Schedule:
        """Return the schedule that `as_json` wrote."""
        calls = [
            Call(each["piece"], tuple(each["takes"]), tuple(each["gives"]), tuple(each["done"]))
            for each in found["calls"]
        ]
        return cls(tuple(calls), tuple(found["returns"]))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Compiled pieces, called as one piece is."""

    codes: tuple[Code, ...]
    schedule: Schedule

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run all calls; `inputs` is emptied, and each value is let go after its last reader."""
        values = dict(enumerate(inputs))
        inputs.clear()
        for call in self.schedule.calls:
            given = [values[number] for number in call.takes]
            for number in call.done:
                del values[number]
            for number, result in zip(call.gives, self.codes[call.piece](given), strict=True):
                if number != _UNREAD:
                    values[number] = result
        return [values[number] for number in self.schedule.returns]


def split(graph: fx.GraphModule) -> tuple[list[fx.GraphModule], Schedule]:
    """Return the pieces of a graph, and the schedule that makes one graph of them.

    A graph without loops is one piece, itself.
    """
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results: Any = nodes[-1].args[0]
    if not any(node.op == "call_module" for node in nodes):
        count = len(placeholders)
        gives = tuple(range(count, count + len(results)))
        inputs = tuple(range(count))
        return [graph], Schedule((Call(0, inputs, gives, done=inputs),), gives)
    numbers: dict[Any, int] = {node: number for number, node in enumerate(placeholders)}
    pieces: list[fx.GraphModule] = []
    calls: list[Call] = []
    for stretch in _stretches(nodes):
        if isinstance(stretch, fx.Node):
            _number([node for node in stretch.users if node.users], numbers)
            loop: Any = graph.get_submodule(str(stretch.target))
            calls += _loop_calls(stretch, loop, len(pieces), numbers)
            pieces.append(loop.body)
        else:
            inside = set(stretch)
            leaving = [node for node in stretch if any(user not in inside for user in node.users)]
            entering = list(
                dict.fromkeys(read for node in stretch for read in node.all_input_nodes if read not in inside)
            )
            _number(leaving, numbers)
            takes, gives = tuple(numbers[node] for node in entering), tuple(numbers[node] for node in leaving)
            calls.append(Call(len(pieces), takes, gives))
            pieces.append(_piece(stretch, entering, leaving))
    return pieces, Schedule(tuple(_with_ends(calls, results, numbers)), tuple(numbers[node] for node in results))


def _number(nodes: Sequence[fx.Node], numbers: dict[Any, int]) -> None:
    for node in nodes:
        numbers[node] = len(numbers)


def _stretches(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node] | fx.Node]:
    """Yield calls of loops, and between them the nodes that stand there.

    A part of an op's tuple goes with the op: only tensors cross from one piece to another.
    """
    found: list[list[fx.Node] | fx.Node] = [[]]
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if node.op == "call_module":
            found += [node, []]
        elif isinstance(source, fx.Node) and source.op == "call_module":
            continue
        elif node.op not in ("placeholder", "output"):
            last = found[-1]
            assert isinstance(last, list), "a stretch follows each loop"  # noqa: S101
            home[node] = home[source] if isinstance(source, fx.Node) and source in home else last
            home[node].append(node)
    yield from (each for each in found if each != [])


def _loop_calls(call: fx.Node, loop: Repeated, piece: int, numbers: dict[Any, int]) -> Iterator[Call]:
    """Yield the calls of a loop's body, one a repeat."""
    carried, same, each = loop.split([numbers[node] for node in call.args])
    num_outputs = len(call.meta["val"]) // loop.count
    read = {user.args[1]: numbers[user] for user in call.users if user in numbers}
    for repeat, own in enumerate(each):
        gives = [read.get(repeat * num_outputs + output, _UNREAD) for output in range(num_outputs)]
        for output in set(loop.carried) if repeat < loop.count - 1 else ():
            if gives[output] == _UNREAD:
                gives[output] = numbers[call, repeat, output] = len(numbers)
        yield Call(piece, (*carried, *own, *same), tuple(gives))
        carried = [gives[output] for output in loop.carried]


def _piece(stretch: Sequence[fx.Node], entering: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(entering):
        new[node] = graph.placeholder(f"input_{number}")
        new[node].meta = dict(node.meta)
    for node in stretch:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in leaving))
    graph.lint()
    return fx.GraphModule(nn.Module(), graph)


def _with_ends(calls: Sequence[Call], results: Sequence[fx.Node], numbers: Mapping[Any, int]) -> Iterator[Call]:
    """Yield the calls, each with the values it is the last to read, or gives for nobody."""
    kept = {numbers[node] for node in results}
    last = {number: at for at, call in enumerate(calls) for number in call.takes}
    for at, call in enumerate(calls):
        done = {number for number in call.takes if last[number] == at} - kept
        yield dataclasses.replace(call, done=tuple(sorted(done)))
