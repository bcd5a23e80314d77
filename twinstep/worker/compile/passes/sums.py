"""Sums over many rows in two steps: a few rows at a time, then those sums.

Gradients of biases and norms are sums over all tokens. Inductor's CPU code walks down one strip of 16 columns after the
other, and each step down is another cache line far away: memory is waited for at every row. Over blocks of rows a block
stays in the cache while its strips are walked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from twinstep.worker.compile.passes.context import PassContext

aten = torch.ops.aten

MIN_ROWS = 1024
"""Fewer rows stay in the cache anyway."""
BLOCK = range(8, 65)
"""Rows of a block: enough to make the second sum small, few enough to stay in the cache."""


def split_tall_sums(graph: fx.GraphModule, _: PassContext) -> int:
    """Write `x.sum(0)` of a tall float32 matrix as two sums, where its rows divide into blocks; return how many."""
    changed = 0
    for node in graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        rows = _tall(node)
        block = max((each for each in BLOCK if rows and rows % each == 0), default=None)
        if rows is None or block is None:
            continue
        x: Any = node.args[0]
        width = x.meta["val"].shape[1]
        with graph.graph.inserting_before(node):
            blocks = _like(node, aten.view.default, x, [rows // block, block, width])
            partial = _like(node, aten.sum.dim_IntList, blocks, [1])
            total = _like(node, aten.sum.dim_IntList, partial, [0], _keeps(node))
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)
        changed += 1
    return changed


def _tall(node: fx.Node) -> int | None:
    """Return the rows of a matrix that is summed over them, if it is tall and float32; else None."""
    x, dims = node.args[0], node.args[1]
    if not isinstance(x, fx.Node) or node.kwargs.get("dtype") is not None:
        return None
    value = x.meta["val"]
    if value.ndim != 2 or value.dtype is not torch.float32 or value.device.type != "cpu":
        return None
    if not isinstance(dims, list | tuple) or list(dims) not in ([0], [-2]) or value.shape[0] < MIN_ROWS:
        return None
    return int(value.shape[0])


def _keeps(node: fx.Node) -> bool:
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return bool(keepdim)


def _like(sum_node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a node that stands where the sum stands, with its own value's shape and dtype."""
    node = sum_node.graph.call_function(target, args)
    value = target(*(each.meta["val"] if isinstance(each, fx.Node) else each for each in args))
    node.meta = {**sum_node.meta, "val": value}
    return node
