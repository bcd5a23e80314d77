"""Finds MLPs over tokens, with no attention in them, that one TPU kernel each way can compute.

An MLP here is all that is computed token by token from products with weights on: products, norms, gates, sums of
several such branches. Its kernel takes a chunk of tokens at a time and writes the one value that others read. The
backward kernel reads the MLP's inputs and the gradient, computes the MLP again, and adds up gradients of weights in
VMEM. So no value in between is kept in memory. `pallas_layers.py` makes the kernels, as it makes those of layers.

# Shapes: M tokens, R tokens of a chunk, E columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from twinstep.worker.compile.lower.pallas_attention import current
from twinstep.worker.compile.lower.pallas_layers import CASTS, VMEM_BYTES, Layer, Plan
from twinstep.worker.compile.lower.pallas_rows import SUBLANES
from twinstep.worker.compile.lower.tpu_layers import (
    RULES,
    NotOfThisKind,
    Search,
    Shape,
    is_many,
    layer_of,
    replace,
)

aten = torch.ops.aten

MIN_TOKENS = 4096
"""Tokens over all devices below which an MLP's values are too few to matter."""
LARGEST, SMALLEST = 512, 32
"""Bounds of R."""

LARGEST_ROW = 1024
"""Most tokens of a row that are a chunk."""

PRODUCTS = (aten.mm.default, aten.addmm.default)


def fuse_mlps(graph: fx.GraphModule, num_state: int) -> int:
    """Replace MLPs by kernels, in place; return how many were.

    Args:
        num_state: the graph's first outputs, which are new state; what the others are made of is the forward pass.
    """
    _turn_back(graph.graph)
    copied: dict[fx.Node, fx.Node] = {}
    before = fx.Graph()  # what layers hold nodes of: those of `graph` go
    before.output(before.graph_copy(graph.graph, copied))
    now = {copy: node for node, copy in copied.items()}
    search, found = Search(before, num_state), 0
    for tokens in _sizes(before):
        for region in _regions(search, Shape(tokens, 1)):
            try:
                layers = _mlp(search, region, Shape(tokens, 1))
            except NotOfThisKind:
                continue
            for each in layers:
                replace(graph.graph, each, now)
            found += 1
    graph.graph.eliminate_dead_code()
    return found


def chunk_of(tokens: int) -> int | None:
    """Return R: the most tokens, a multiple of 8, that divide those of a device's core; None where only few would."""
    spread = current()
    parts = 1 if spread is None else spread.devices * spread.cores
    if tokens % parts:
        return None
    sizes = range(LARGEST, SMALLEST - 1, -SUBLANES)
    return next((size for size in sizes if tokens // parts % size == 0), None)


def _turn_back(graph: fx.Graph) -> None:
    """Let products read a weight that was transposed twice as it is."""
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        left, right = product.args
        if right.target is aten.permute.default and right.args[1] == [1, 0]:
            inner = right.args[0]
            if inner.target is aten.permute.default and inner.args[1] == [1, 0]:
                product.args = (left, inner.args[0])


def _sizes(graph: fx.Graph) -> list[int]:
    """Return the numbers of tokens that products are taken of."""
    found = {node.meta["val"].shape[0] for node in graph.nodes if node.target in PRODUCTS}
    return sorted(size for size in found if size >= MIN_TOKENS and chunk_of(size) is not None)


def _regions(search: Search, shape: Shape) -> list[set[fx.Node]]:
    """Return sets of nodes, of both passes, that hang together and are computed token by token."""
    inside: set[fx.Node] = set()
    for node in search.nodes:
        if not _by_token(node, shape):
            continue
        if node not in search.forward or node.target in PRODUCTS or inside.intersection(node.all_input_nodes):
            inside.add(node)
            casts = [each for each in node.all_input_nodes if each.target in CASTS and _by_token(each, shape)]
            inside.update(each for each in casts if shape.tokens(each.args[0]))
    return [each for each in _components(inside, search, shape) if each & search.forward and each - search.forward]


def _by_token(node: fx.Node, shape: Shape) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or node.target not in RULES:
        return False
    if is_many(node):
        return any(map(shape.tokens, node.all_input_nodes)) and RULES[node.target](node, shape)
    floats = isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
    return floats and shape.tokens(node) and RULES[node.target](node, shape)


def _components(inside: set[fx.Node], search: Search, shape: Shape) -> list[set[fx.Node]]:
    """Return what hangs together: by an edge, or by a gradient that both read."""
    found, left = [], set(inside)
    while left:
        component, waiting = set(), [left.pop()]
        while waiting:
            node = waiting.pop()
            component.add(node)
            near = {*node.all_input_nodes, *node.users}
            near.update(
                user
                for each in node.all_input_nodes
                if each not in search.forward and shape.tokens(each)
                for user in each.users
            )
            new = near & left
            left -= new
            waiting += new
        found.append(component)
    return found


def _mlp(search: Search, region: set[fx.Node], shape: Shape) -> tuple[Layer, Layer]:
    """Return what computes an MLP, and its gradients.

    Raises:
        NotOfThisKind: it is none, or VMEM does not hold it.
    """
    forward = region & search.forward
    backward = region - forward
    read = {each for node in region for each in node.all_input_nodes if shape.tokens(each)}
    sums = search.sums(backward, region | read, shape)
    inner = {*region, *sums, *(user for node in region for user in node.users if _only_for(user, sums))}
    results = [node for node in search.nodes if node in forward and not inner.issuperset(node.users)]
    gradients = [node for node in search.nodes if node in backward and not inner.issuperset(node.users)]
    if len(results) != 1 or not gradients or not sums or any(map(is_many, (*results, *gradients))):
        raise NotOfThisKind
    layers = (
        layer_of(results, (), set(), forward, shape),
        layer_of(gradients, sums, set(), region, shape),
    )
    whole = [node.meta["val"] for each in layers for node in each.weights]
    if any(value.shape[:1] == (shape.rows,) for value in whole):  # leaves of the batch, which are no node's tokens
        raise NotOfThisKind
    if not all(_in_order(search, each, inner) for each in layers):
        raise NotOfThisKind
    for size in filter(None, (_row(results[0], shape), chunk_of(shape.rows))):
        forth, back = (dataclasses.replace(each, rows=shape.rows // size, slots=size) for each in layers)
        if all(Plan.of(each).vmem_bytes() <= VMEM_BYTES for each in (forth, back)):
            return forth, back
    raise NotOfThisKind


def _row(result: fx.Node, shape: Shape) -> int | None:
    """Return the tokens of a row of the batch where the result is read by rows alone, of at most `LARGEST_ROW`.

    Then a chunk is a row. Rows that fill no whole tiles are padded in memory: to read them as tokens would be a copy.
    """
    spread = current()
    parts = 1 if spread is None else spread.devices * spread.cores
    found = {tuple(user.meta["val"].shape) for user in result.users if user.target is aten.view.default}
    if len(found) != 1 or any(user.target is not aten.view.default for user in result.users):
        return None
    rows, size, *rest = *found.pop(), 0
    whole = len(rest) == 2 and rows * size == shape.rows and rows % parts == 0
    return size if whole and SMALLEST <= size <= LARGEST_ROW else None


def _only_for(node: fx.Node, sums: Iterable[fx.Node]) -> bool:
    """Say whether a node is tokens the other way round that sums alone read."""
    return node.target is aten.permute.default and set(sums).issuperset(node.users)


def _in_order(search: Search, layer: Layer, inner: set[fx.Node]) -> bool:
    """Say whether all that a kernel reads stands before all that reads its results: then nothing waits for itself."""
    last = max(search.at[each] for each in (*layer.tokens, *layer.weights))
    users = {user for node in (*layer.results, *layer.sums) for user in node.users} - inner
    return all(search.at[each] > last for each in users)
