"""Find runs of equal regions in a graph: L layers one after the other, forward or backward. Pure: changes no graph.

A trace writes a layer's nodes in the same order for each layer, so that equal layers stand in the list of nodes as one
stretch repeated L times. Such runs are found over one token a node (op, constants, shapes) and then proven: node by
node the same op, constants, shapes, dtypes and strides, and every argument in the same role in each repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

Role = tuple[fx.Node, ...]
"""What one input of the region is, in each repeat."""


@dataclass(frozen=True, slots=True)
class Region:
    """A proven run: `count` equal stretches of `length` nodes each, back to back."""

    windows: tuple[tuple[fx.Node, ...], ...]
    """The nodes of each repeat, in order."""
    carried: tuple[tuple[Role, int], ...]
    """Inputs that a repeat takes from the one before it, and the position of the node whose value that is."""
    each: tuple[Role, ...]
    """Inputs that differ from repeat to repeat: a layer's parameters, what its forward pass left for its backward."""
    same: tuple[Role, ...]
    """Inputs that are the same for all: a mask, lengths."""
    outputs: tuple[int, ...]
    """Positions of the nodes whose values are read outside their repeat."""

    @property
    def count(self) -> int:
        """Repeats."""
        return len(self.windows)

    @property
    def length(self) -> int:
        """Nodes of one repeat."""
        return len(self.windows[0])


def layout(value: Any) -> Any:
    """Return what must be equal between two values for one program to take either."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    if isinstance(value, tuple | list):
        return tuple(layout(each) for each in value)
    return repr(value)


def find_region(
    graph: fx.Graph, heavy: frozenset[Any], *, min_repeats: int, min_nodes: int, refused: dict[fx.Node, str]
) -> Region | None:
    """Return the run that saves most nodes, of those that hold an op of `heavy` and can be proven; None: there is none.

    Args:
        graph: nodes carry `meta["val"]`.
        heavy: packets of ops (matrix products) without one of which a region is not worth a call.
        min_repeats: fewest repeats.
        min_nodes: fewest nodes that a run must save.
        refused: filled with why a run was not taken, by its first node.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not nodes:
        return None
    index = {node: position for position, node in enumerate(nodes)}
    tokens = _tokens(nodes)
    widths = _carried_bytes(nodes, index)
    for start, period, stop in _runs(tokens, min_repeats):
        if ((stop - start) // period - 1) * period < min_nodes:
            return None  # those that follow save less
        window = nodes[start : start + period]
        if not any(getattr(node.target, "overloadpacket", None) in heavy or _is_own(node) for node in window):
            continue
        why = ""
        for begin, count in _attempts(start, period, stop, min_repeats, widths):
            windows = [nodes[at : at + period] for at in range(begin, begin + count * period, period)]
            region, why = _prove(windows)
            if region is not None and (region.count - 1) * region.length >= min_nodes:
                return region
        refused[window[0]] = why
    return None


def _is_own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "twinstep"


def _tokens(nodes: Sequence[fx.Node]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number a node: equal for nodes that do the same to values of the same layout."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_token(node), len(numbers)) for node in nodes], dtype=np.int64)


def _token(node: fx.Node) -> Any:
    pure = node.op == "call_function" and not (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )
    if not pure:
        return node  # equal to no other
    return node.target, _frozen(node.args), _frozen(node.kwargs), layout(node.meta.get("val"))


def _frozen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return "node", layout(value.meta.get("val"))
    if isinstance(value, Mapping):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return type(value).__name__, repr(value)


def _runs(tokens: np.ndarray[Any, np.dtype[np.int64]], min_repeats: int) -> Iterator[tuple[int, int, int]]:
    """Yield `(start, period, stop)` of stretches that repeat, those that save most first, then the shortest period."""
    found = []
    for period in range(4, len(tokens) // min_repeats + 1):
        equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            count = int(stop - start + period) // period
            if count >= min_repeats:
                found.append((-(count - 1) * period, period, int(start), int(stop) + period))
    for _, period, start, stop in sorted(found):
        yield start, period, stop


def _carried_bytes(nodes: Sequence[fx.Node], index: Mapping[fx.Node, int]) -> list[float]:
    """Return, for the gap before each node, the bytes that nodes before it leave for nodes close behind it."""
    change = [0.0] * (len(nodes) + 1)
    for position, node in enumerate(nodes):
        last = max((index[user] for user in node.users if user in index), default=position)
        value = node.meta.get("val")
        # A value that is several (an op's tuple) may not cross: it is no tensor.
        width = float(value.numel() * value.element_size()) + 1 if isinstance(value, Tensor) else 1e15
        change[position + 1] += width
        change[min(last, len(nodes) - 1) + 1] -= width
    total, widths = 0.0, []
    for each in change:
        total += each
        widths.append(total)
    return widths


def _attempts(
    start: int, period: int, stop: int, min_repeats: int, widths: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """Yield where the first repeat might begin, and how many follow: most repeats, then least carried over.

    After those that cover the run come parts of it: two towers of equal layers are one run, but two stacks.
    """
    starts = [begin for begin in range(start, start + period) if (stop - begin) // period >= min_repeats]
    starts.sort(key=lambda begin: (-((stop - begin) // period), widths[begin + period], begin))
    for begin in starts[:_MAX_STARTS]:
        yield begin, (stop - begin) // period
    for begin in starts[:2]:
        whole = (stop - begin) // period
        for count in range(whole - 1, min_repeats - 1, -1):
            for skipped in range(whole - count + 1):
                yield begin + skipped * period, count


_MAX_STARTS = 24  # each costs a proof; what carries little over is what begins where a layer does


def reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that `node` reads, argument by argument, one that is read twice twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _prove(windows: Sequence[Sequence[fx.Node]]) -> tuple[Region | None, str]:
    """Return the region that `windows` are repeats of, or None and why they are none."""
    place = {node: (repeat, at) for repeat, window in enumerate(windows) for at, node in enumerate(window)}
    roles: dict[Role, None] = {}
    for at, row in enumerate(zip(*windows, strict=True)):
        given = [reads(node) for node in row]
        if len({_token(node) for node in row}) != 1 or len({len(each) for each in given}) != 1:
            return None, f"node {at} differs between repeats"
        for role in zip(*given, strict=True):
            if len({_within(place.get(node), repeat) for repeat, node in enumerate(role)}) != 1:
                return None, f"{row[0].name} reads other values in other repeats"
            if _within(place.get(role[0]), 0) is None:
                roles[role] = None
    carried: list[tuple[Role, int]] = []
    each: list[Role] = []
    same: list[Role] = []
    for role in roles:
        if not isinstance(role[0].meta.get("val"), Tensor):
            return None, f"{role[0].name}, which enters, is no tensor"
        if len({layout(node.meta["val"]) for node in role}) != 1:
            return None, f"{role[0].name} has another layout in another repeat"
        if not any(node in place for node in role):
            (same if len(set(role)) == 1 else each).append(role)
            continue
        # How many repeats back, and from which node: the same for all but the first, which starts from outside.
        found = [place.get(node) for node in role[1:]]
        sources = {at and (repeat - at[0], at[1]) for repeat, at in enumerate(found, start=1)}
        source = sources.pop()
        if sources or source is None or source[0] != 1:
            return None, f"{role[0].name} comes from more than one repeat back"
        carried.append((role, source[1]))
    outputs = _outputs(windows, place)
    if not all(isinstance(windows[0][at].meta.get("val"), Tensor) for at in outputs):
        return None, "a value that leaves is no tensor"
    return Region(tuple(map(tuple, windows)), tuple(carried), tuple(each), tuple(same), outputs), ""


def _within(found: tuple[int, int] | None, repeat: int) -> int | None:
    """Return the position of a node in its reader's own repeat, or None where it stands outside of it."""
    return found[1] if found is not None and found[0] == repeat else None


def _outputs(windows: Sequence[Sequence[fx.Node]], place: Mapping[fx.Node, tuple[int, int]]) -> tuple[int, ...]:
    leaving = set()
    for repeat, window in enumerate(windows):
        for at, node in enumerate(window):
            if any((place[user][0] if user in place else None) != repeat for user in node.users):
                leaving.add(at)
    return tuple(sorted(leaving))
