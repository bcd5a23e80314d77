"""Rematerialisation: values of the forward pass that the backward pass computes again instead of keeping.

A plan says what is kept. The least that must be, if all cheap ops are run again, is a minimum cut of the forward graph
with bytes as capacities; with matrix products run again too, it is less (Chen et al. 2016, arXiv:1604.06174; the cut as
in PyTorch's `min_cut_rematerialization_partition`). Between the least and everything lie plans that keep more: first
the values that spare most operations a byte. Of a dozen plans the one with the fewest operations whose peak fits the
budget is taken. The peak is that of the graph in its order, where each second run stands as late as can be; it was
within 1 % of what Inductor's code then allocated. Random ops are never run twice: their results are kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.costs import flops, is_product, is_random, is_view, num_bytes, owner, peak
from twinstep.worker.compile.passes.edit import call
from twinstep.worker.compile.stages import stage
from twinstep.worker.compile.strategies import Rematerialise
from twinstep.worker.ops.barrier import BARRIER

PLANS = 6
"""Plans tried with, and as many without, matrix products run again."""
MOST_CANDIDATES = 200
"""Values a plan considers keeping; the rest of a very large graph is run again."""


def rematerialise(graph: fx.GraphModule, context: PassContext) -> int:
    """Bring the peak of live values under the budget; return how many nodes are computed twice.

    Raises:
        CompileError: the budget cannot be met; the message names the least that can, and what holds it.
    """
    wanted = context.strategy(Rematerialise)
    assert wanted is not None  # noqa: S101
    split = _Split(graph.graph)
    before, _ = peak(graph.graph)
    again = _choose(graph.graph, split, wanted.budget_bytes) if before > wanted.budget_bytes else []
    operations = sum(map(flops, graph.graph.nodes))
    kept = split.kept_bytes(split.needed)
    _write(graph.graph, again, context.backend)
    context.notes["rematerialise"] = {
        "budget bytes": wanted.budget_bytes,
        "peak bytes before": before,
        "peak bytes after": peak(graph.graph)[0],
        "kept bytes before": kept,
        "kept bytes after": split.kept_bytes(split.read_late(again)),
        "nodes computed again": len(again),
        "operations computed again": sum(map(flops, again)),
        "operations of a step": operations,
    }
    return len(again)


class _Split:
    """The forward pass as the backward pass sees it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.forward = [node for node in graph.nodes if node.op == "call_function" and stage(node) == "forward"]
        self._inside = set(self.forward)
        self.returned = {owner(each) for each in graph.output_node().all_input_nodes}
        self.needed = {node for node in self.forward if any(map(self._is_later, node.users))}
        """What the backward pass, or the update, reads."""

    def _is_later(self, user: fx.Node) -> bool:
        return user.op == "call_function" and user not in self._inside

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return what a forward node reads of the forward pass."""
        return [each for each in node.all_input_nodes if each in self._inside]

    def kept_bytes(self, kept: Iterable[fx.Node]) -> int:
        """Return the bytes of values that live into the backward pass; what is returned lives anyway."""
        return sum(num_bytes(each) for each in {owner(node) for node in kept} - self.returned if each in self._inside)

    def computed_again(self, kept: set[fx.Node]) -> list[fx.Node]:
        """Return the nodes that are run again if `kept` is kept, in order."""
        todo = [node for node in self.needed if node not in kept]
        found: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += [each for each in self.inputs(node) if each not in kept]
        return [node for node in self.forward if node in found]

    def read_late(self, again: list[fx.Node]) -> set[fx.Node]:
        """Return what lives into the backward pass: what it reads, or what is run again there reads."""
        inside = set(again)
        return {each for node in again for each in self.inputs(node) if each not in inside} | (self.needed - inside)

    def least(self, *, products: bool) -> set[fx.Node]:
        """Return what must be kept at the least, by minimum cut.

        Args:
            products: whether matrix products may be computed again.
        """
        import networkx as nx  # which only this asks for

        flow = nx.DiGraph()
        for node in self.forward:
            if is_random(node) or (is_product(node) and not products):
                flow.add_edge("source", (node, "in"))
            if _is_tensor(node) and (not is_view(node) or node.target is operator.getitem):
                room = 0 if owner(node) in self.returned else num_bytes(node)
                flow.add_edge((node, "in"), (node, "out"), capacity=room)
            else:
                flow.add_edge((node, "in"), (node, "out"))  # endless: what it is a view, or a part, of is kept
            if node in self.needed:
                flow.add_edge((node, "out"), "sink")
            for each in self.inputs(node):
                flow.add_edge((each, "out"), (node, "in"))
        if "source" not in flow or "sink" not in flow:
            return set()
        _, (reached, _) = nx.minimum_cut(flow, "source", "sink")
        return {node for node in self.forward if (node, "in") in reached and (node, "out") not in reached}

    def with_views(self, kept: set[fx.Node]) -> set[fx.Node]:
        """Return `kept` and all views of it and of inputs: they cost nothing."""
        found = set(kept)
        for node in self.forward:
            if is_view(node) and all(each in found for each in self.inputs(node)):
                found.add(node)
        return found


def _choose(graph: fx.Graph, split: _Split, budget: int) -> list[fx.Node]:
    """Return the nodes to run again: of all plans that fit, the one that takes fewest operations."""
    best: tuple[int, list[fx.Node]] | None = None
    least: tuple[int, list[fx.Node]] | None = None
    for again in _plans(split):
        most, there = peak(_tried(graph, again))
        if least is None or most < least[0]:
            least = most, there
        cost = sum(map(flops, again))
        if most <= budget and (best is None or cost < best[0]):
            best = cost, again
    if best is not None:
        return best[1]
    assert least is not None  # noqa: S101
    named = ", ".join(
        f"{each.name} {list(each.meta['val'].shape)} ({num_bytes(each):,} bytes)" for each in least[1][:3]
    )
    raise CompileError(
        f"strategy rematerialise: {budget:,} bytes cannot be met; the least is {least[0]:,}, held by {named}",
        remedy=f"set budget_bytes to {least[0]} or more, or make the batch smaller",
    )


def _plans(split: _Split) -> Iterator[list[fx.Node]]:
    """Yield what is run again by plans that keep more and more."""
    most = split.kept_bytes(split.needed)
    for products in (True, False):
        kept = split.least(products=products)
        again = split.computed_again(split.with_views(kept))
        yield again
        least = split.kept_bytes(split.read_late(again))
        for part in range(1, PLANS):
            room = least + (most - least) * part // PLANS
            yield split.computed_again(split.with_views(_filled(split, kept, room)))


def _filled(split: _Split, kept: set[fx.Node], room: int) -> set[fx.Node]:
    """Keep more, up to `room` bytes: first what spares most operations a byte."""
    again = split.computed_again(kept)
    cost = sum(map(flops, again))
    candidates = [node for node in again if _is_tensor(node) and not is_view(node)]
    candidates.sort(key=lambda node: flops(node) / max(num_bytes(node), 1), reverse=True)
    for node in candidates[:MOST_CANDIDATES]:
        more = kept | {node}
        again = split.computed_again(more)
        now = sum(map(flops, again))
        if now < cost and split.kept_bytes(split.read_late(again)) <= room:
            kept, cost = more, now
    return kept


def _tried(graph: fx.Graph, again: list[fx.Node]) -> fx.Graph:
    """Return a copy of `graph` in which `again` is run again."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, new))
    _write(copy, [new[node] for node in again], "")
    return copy


def _write(graph: fx.Graph, again: list[fx.Node], backend: str) -> None:
    """Add a second run of `again`, each node as late as can be, and let the backward pass read it."""
    inside = set(again)
    second: dict[fx.Node, fx.Node] = {}
    gradients: set[fx.Node] = set()
    latest: fx.Node | None = None
    for reader in [node for node in graph.nodes if _is_late(node)]:
        wanted = [each for each in reader.all_input_nodes if each in inside]
        todo = _unmade(wanted, inside, second)
        with graph.inserting_before(reader):
            if todo and backend == "xla":
                _fence(graph, todo, inside, second, latest, like=reader)
            for node in [each for each in again if each in todo]:
                second[node] = graph.node_copy(node, lambda each: second.get(each, each))
                second[node].meta = {"val": node.meta["val"], "stage": stage(reader)}
        for each in wanted:
            reader.replace_input_with(each, second[each])
        if not gradients or not gradients.isdisjoint(reader.all_input_nodes):
            gradients.add(reader)
            latest = reader if _is_tensor(reader) else latest


def _unmade(wanted: list[fx.Node], inside: set[fx.Node], second: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the nodes of a second run of `wanted` that are not there yet."""
    found: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in found and node not in second:
            found.add(node)
            todo += [each for each in node.all_input_nodes if each in inside]
    return found


def _fence(
    graph: fx.Graph,
    todo: set[fx.Node],
    inside: set[fx.Node],
    second: dict[fx.Node, fx.Node],
    waits_for: fx.Node | None,
    *,
    like: fx.Node,
) -> None:
    """Put a barrier, which waits for a gradient, before what a second run of `todo` reads; note it in `second`."""
    read = dict.fromkeys(each for node in todo for each in node.all_input_nodes)
    sources = [each for each in read if each not in inside and each not in second and _is_tensor(each)]
    if sources:
        barrier = call(graph, BARRIER, [*sources, *([waits_for] if waits_for else [])], like=like)
        for index, each in enumerate(sources):
            second[each] = call(graph, operator.getitem, barrier, index, like=like)


def _is_late(node: fx.Node) -> bool:
    return node.op == "call_function" and stage(node) != "forward"


def _is_tensor(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return hasattr(value, "element_size")
