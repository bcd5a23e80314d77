"""Finds the layers of a step's graph that one TPU kernel each can compute, forward and backward.

A layer is what stands around one attention node, between two places of the graph at which a single value of [B · S, E]
is handed on: the residual stream. Everything between them must work token by token, attention apart. Then
`pallas_layers.py` computes it in one kernel per row of the batch, which reads that one value and writes the next; the
backward kernel reads it again with the gradient, and computes again what the backward pass wants of the forward pass.

Nothing here knows a model. Where a layer is not of this kind (another op between, tokens in another order, more VMEM
than there is) it stays as it is.

# Shapes: B rows, S slots per row, M = B · S tokens, E columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twinstep.worker.compile.lower.pallas_attention import current
from twinstep.worker.compile.lower.pallas_layers import (
    ATTENTION,
    CASTS,
    ELEMENTWISE,
    VIEWS,
    VMEM_BYTES,
    Layer,
    Plan,
    attention_arguments,
    chunk_size,
)
from twinstep.worker.ops.hstu_attention import OPERATOR, OPERATOR_BACKWARD

aten = torch.ops.aten


def fuse_layers(graph: fx.GraphModule, num_state: int) -> int:
    """Replace layers by kernels, in place; return how many were.

    Args:
        num_state: the graph's first outputs, which are new state; what the others are made of is the forward pass.
    """
    copied: dict[fx.Node, fx.Node] = {}
    before = fx.Graph()  # what layers hold nodes of: those of `graph` go
    before.output(before.graph_copy(graph.graph, copied))
    now = {copy: node for node, copy in copied.items()}
    search = Search(before, num_state)
    found = list(filter(None, (search.layer(*each) for each in search.pairs())))
    for forward, backward in found:
        replace(graph.graph, forward, now)
        replace(graph.graph, backward, now)
    graph.graph.eliminate_dead_code()
    return len(found)


class NotOfThisKind(Exception):
    """A layer is not of the kind that can be fused."""


@dataclass(frozen=True, slots=True)
class Shape:
    """B and S; tokens that stand in no rows are rows of one."""

    rows: int
    slots: int

    def tokens(self, node: fx.Node) -> bool:
        """Say whether a node's value is one of tokens: [M, …] or [B, S, …]."""
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            return False
        shape = tuple(value.shape)
        return shape[:2] == (self.rows, self.slots) or shape[:1] == (self.rows * self.slots,)

    def stream(self, node: fx.Node) -> bool:
        """Say whether a node's value may be what layers hand on."""
        value = node.meta["val"]
        return bool(self.tokens(node) and value.dim() == 2 and value.dtype is torch.float32)


class Search:
    """One graph, its forward pass told from the rest."""

    def __init__(self, graph: fx.Graph, num_state: int) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: at for at, node in enumerate(self.nodes)}
        outputs: Any = graph.output_node().args[0]
        given = [each for each in outputs[num_state:] if isinstance(each, fx.Node)]
        # Gradients are outputs too where a user or an engine asks for them: nothing of the forward pass.
        back = starts_of_gradients(self.nodes)
        self.forward = set().union(*(found for found in map(ancestors, zip(given)) if not back & found))
        self.forward |= {user for node in self.forward if is_many(node) for user in node.users}
        self._attention = [node for node in self.nodes if node.target in ATTENTION]
        self._claimed: set[fx.Node] = set()
        """Sums that a layer gives already."""

    def pairs(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return attention nodes with the nodes of their gradients."""
        found = []
        for forward in self._attention:
            for backward in self._attention:
                if forward.target is OPERATOR and backward.target is OPERATOR_BACKWARD and forward in self.forward:
                    given, read = attention_arguments(forward), attention_arguments(backward)[1:]
                    if given == read and forward.args[3:] == backward.args[4:]:
                        found.append((forward, backward))
        return found

    def layer(self, forward: fx.Node, backward: fx.Node) -> tuple[Layer, Layer] | None:
        """Return what computes the layer around an attention node, and its gradients; None where nothing can."""
        rows, slots = forward.meta["val"].shape[:2]
        shape = Shape(rows, slots)
        try:
            spread = current()
            cut = spread is not None and rows % spread.devices
            if cut or chunk_size(slots) is None or backward in self.forward:
                raise NotOfThisKind
            x, y = self._ends(forward, shape, lambda node: node in self.forward)
            grad_y, grad_x = self._ends(backward, shape, lambda node: node not in self.forward)
            inside = {
                node
                for node in self.nodes[self.at[x] + 1 : self.at[y] + 1]
                if node in self.forward and shape.tokens(node)
            }
            for node in self.nodes[self.at[y] : self.at[grad_x]]:  # what the backward pass makes of them alone
                read = [each for each in node.all_input_nodes if shape.tokens(each)]
                if read and shape.tokens(node) and {*inside, x}.issuperset(read):
                    inside.add(node)
            after = self._reached(grad_y, self.at[grad_x], shape)
            sums = tuple(each for each in self.sums(after, {*inside, x, grad_y}, shape) if each not in self._claimed)
            layers = (
                layer_of((y,), (), {x}, inside, shape, forward),
                layer_of((grad_x,), sums, {x, grad_y}, {*inside, *after}, shape, backward),
            )
            if any(Plan.of(each).vmem_bytes() > VMEM_BYTES for each in layers):
                raise NotOfThisKind
        except NotOfThisKind:
            return None
        self._claimed.update(sums)
        return layers

    def _ends(self, anchor: fx.Node, shape: Shape, counts: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node]:
        """Return the values before and after an attention node that alone are handed on where they stand."""
        at = self.at[anchor]
        neighbours = [self.at[each] for each in self._attention if each is not anchor and counts(each)]
        first = max((each for each in neighbours if each < at), default=-1)
        last = min((each for each in neighbours if each > at), default=len(self.nodes))
        lives = []
        for node in self.nodes:
            if counts(node) and shape.tokens(node) and node.meta["val"].is_floating_point():
                until = max((self.at[user] for user in node.users if counts(user)), default=-1)
                lives.append((node, self.at[node], until))

        def alone(place: int) -> fx.Node | None:
            alive = [node for node, start, end in lives if start <= place < end]
            return alive[0] if len(alive) == 1 and shape.stream(alive[0]) else None

        before = next(filter(None, map(alone, range(at - 1, first, -1))), None)
        after = next(filter(None, map(alone, range(at, last))), None)
        if before is None or after is None:
            raise NotOfThisKind
        return before, after

    def _reached(self, start: fx.Node, end: int, shape: Shape) -> set[fx.Node]:
        """Return what of tokens depends on `start`, and stands no later than `end`."""
        reached = {start}
        for node in self.nodes[self.at[start] + 1 : end + 1]:
            if reached.intersection(node.all_input_nodes) and (shape.tokens(node) or is_many(node)):
                reached.add(node)
        return reached - {start}

    def sums(self, after: set[fx.Node], known: set[fx.Node], shape: Shape) -> tuple[fx.Node, ...]:
        """Return the sums over all tokens that are taken of a layer's gradients."""
        there = {*after, *known}

        def taken(node: Any) -> bool:
            return isinstance(node, fx.Node) and node in there

        found = []
        for node in self.nodes:
            if node.target is aten.sum.dim_IntList and taken(node.args[0]) and shape.tokens(node.args[0]):
                over = node.args[1] == [0] and not node.kwargs and node.args[0].meta["val"].dim() == 2
                found += [node] if over and node not in self.forward else []
            elif node.target is aten.mm.default and node not in self.forward:
                left, right = node.args
                if left.target is aten.permute.default and taken(left.args[0]) and taken(right):
                    found.append(node)
        return tuple(found)


def starts_of_gradients(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the gradients of attention nodes, and the ones, of a loss, that those are made of."""
    found = {node for node in nodes if node.target is OPERATOR_BACKWARD}
    ones = (aten.full_like.default, aten.ones_like.default)
    made_of = ancestors([node.all_input_nodes[0] for node in found])
    return found | {node for node in made_of if node.target in ones and not node.meta["val"].dim()}


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def is_many(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def layer_of(
    results: Sequence[fx.Node],
    sums: Sequence[fx.Node],
    given: set[fx.Node],
    inside: set[fx.Node],
    shape: Shape,
    attention: fx.Node | None = None,
) -> Layer:
    """Return the layer that computes `results` and `sums` from the tokens `given`, and others from outside.

    Args:
        inside: what may be computed.
        attention: the attention node around which it is, if there is one.

    Raises:
        NotOfThisKind: an op in it does not work token by token.
    """
    nodes: dict[fx.Node, None] = {}
    tokens: dict[fx.Node, None] = {}
    weights: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in nodes or node in tokens or node in weights:
            return
        ours = node in inside or node in sums or (is_many(node) and any(map(shape.tokens, node.all_input_nodes)))
        if node in given or (shape.tokens(node) and not ours):
            tokens[node] = None
        elif ours or _turned(node, shape):
            for each in _reads(node):
                visit(each)
            _check(node, shape)
            nodes[node] = None
        elif node.target is aten.permute.default and node.args[1] == [1, 0]:
            weights[node.args[0]] = None  # type: ignore[index]
        else:
            weights[node] = None

    for each in (*results, *sums):
        visit(each)
    attended = [node for node in nodes if node.target in ATTENTION]
    rules = [each.args[3 if each.target is OPERATOR else 4 :] for each in (*attended, attention) if each is not None]
    if bool(attended) != (attention is not None) or any(each != rules[0] for each in rules):
        raise NotOfThisKind
    if any(each.meta["val"].dtype is not torch.float32 for each in tokens):
        raise NotOfThisKind
    order = sorted(nodes, key=list(results[0].graph.nodes).index)
    return Layer(tuple(order), tuple(tokens), tuple(weights), tuple(results), tuple(sums), shape.rows, shape.slots)


def _turned(node: fx.Node, shape: Shape) -> bool:
    """Say whether a node is tokens the other way round, as the gradient of a weight reads them."""
    return node.target is aten.permute.default and shape.tokens(node.args[0])  # type: ignore[arg-type]


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return what a node reads within a kernel: of attention only what comes by rows."""
    if node.target in ATTENTION:
        return [each for each in node.args[: 3 if node.target is OPERATOR else 4] if isinstance(each, fx.Node)]
    return node.all_input_nodes


def _check(node: fx.Node, shape: Shape) -> None:
    """Raise NotOfThisKind unless a kernel can compute the node token by token."""
    rule = RULES.get(node.target)
    if rule is None or not rule(node, shape):
        raise NotOfThisKind


def _elementwise(node: fx.Node, shape: Shape) -> bool:
    *tokens, columns = node.meta["val"].shape
    if tuple(tokens) not in ((shape.rows * shape.slots,), (shape.rows, shape.slots)):
        return False
    for each in node.all_input_nodes:
        value = each.meta["val"]
        if shape.tokens(each):
            if list(value.shape[:-1]) != tokens:
                return False
        elif value.numel() not in (1, columns) or value.dim() > 1:
            return False
    return not node.kwargs


def _view(node: fx.Node, shape: Shape) -> bool:
    source: Any = node.args[0]
    return shape.tokens(source) and shape.tokens(node)


def _split(node: fx.Node, shape: Shape) -> bool:
    return node.args[2:] == (1,) and node.args[0].meta["val"].dim() == 2  # type: ignore[union-attr]


def _slice(node: fx.Node, shape: Shape) -> bool:
    if len(node.args) != 4 or node.args[1] != 1 or node.meta["val"].dim() != 2:
        return False
    start, end = node.args[2:]
    return isinstance(start, int) and isinstance(end, int) and 0 <= start < end


def _product(node: fx.Node, shape: Shape) -> bool:
    left, right = node.args
    if _turned(left, shape):  # type: ignore[arg-type]
        return left.args[1] == [1, 0] and shape.tokens(right)  # type: ignore[union-attr,arg-type]
    return shape.tokens(left) and not shape.tokens(right) and not _turned(right, shape)  # type: ignore[arg-type]


def _product_with_bias(node: fx.Node, shape: Shape) -> bool:
    bias: Any = node.args[0]
    left, right = node.args[1:]
    columns = node.meta["val"].shape[1:]
    return (
        bias.meta["val"].shape == columns
        and not node.kwargs
        and shape.tokens(left)  # type: ignore[arg-type]
        and not shape.tokens(right)  # type: ignore[arg-type]
        and not _turned(left, shape)  # type: ignore[arg-type]
        and not _turned(right, shape)  # type: ignore[arg-type]
    )


def _sum(node: fx.Node, shape: Shape) -> bool:
    source: Any = node.args[0]
    if source.meta["val"].dim() != 2 or node.kwargs:
        return False
    return node.args[1] == [0] or (node.args[1] in ([1], [-1]) and node.args[2:] == (True,))


def _norm(node: fx.Node, shape: Shape) -> bool:
    x, over, *parts, _ = node.args
    found: Any = x
    return found.meta["val"].dim() == 2 and len(over) == 1 and all(isinstance(each, fx.Node) for each in parts)  # type: ignore[arg-type]


def _getitem(node: fx.Node, shape: Shape) -> bool:
    source: Any = node.args[0]
    return source.target in (aten.split_with_sizes.default, aten.native_layer_norm.default, OPERATOR_BACKWARD)


RULES: dict[Any, Callable[[fx.Node, Shape], bool]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(CASTS, lambda node, shape: True),
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.cat.default: lambda node, shape: node.args[1:] == (1,) and node.meta["val"].dim() == 2,
    aten.mm.default: _product,
    aten.addmm.default: _product_with_bias,
    aten.sum.dim_IntList: _sum,
    aten.native_layer_norm.default: _norm,
    aten.permute.default: _turned,
    operator.getitem: _getitem,
    OPERATOR: lambda node, shape: True,
    OPERATOR_BACKWARD: lambda node, shape: len(node.users) == 3,
}
"""What a kernel can compute, and under which condition."""


def replace(graph: fx.Graph, layer: Layer, now: dict[fx.Node, fx.Node]) -> None:
    """Let a kernel compute what the layer gives; `now` says what stands in `graph` for a node, and is told."""
    attention = layer.attention
    at = 3 if attention is not None and attention.target is OPERATOR else 4
    lengths = () if attention is None else attention.args[at : at + 3]
    reads = [now[each] for each in (*layer.tokens, *layer.weights, *lengths)]  # type: ignore[index]
    order = {node: place for place, node in enumerate(graph.nodes)}
    given = (*layer.results, *layer.sums)
    with graph.inserting_after(max(reads, key=order.__getitem__)):
        made = graph.call_function(layer, tuple(reads))
    made.meta = {**given[0].meta, "val": tuple(each.meta["val"] for each in given)}
    place = made
    for number, each in enumerate(given):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (made, number))
        place.meta = dict(each.meta)
        now[each].replace_all_uses_with(place)
        now[each] = place
