"""Products of a tall matrix with a small one through oneDNN, on processors where that beats torch's BLAS.

Inductor would call `mm` and `addmm`, which are MKL's. Those whose left side is not stored row by row (gradients of
weights) stay: there the two are level.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.ops.linear import LINEAR, beats_blas

aten = torch.ops.aten

MIN_ROWS = 512
"""Below, a call costs more than it saves."""


def tall_products(graph: fx.GraphModule, context: PassContext) -> int:
    """Put `twinstep::linear` in place of tall products and the bias added to them; return how many."""
    if not beats_blas():
        context.notes["tall_products"] = "left to torch's BLAS: it is as fast on this processor"
        return 0
    changed = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        bias, x, w = node.args if node.target is aten.addmm.default else (None, *node.args)
        if not _is_tall(x, w) or node.kwargs:
            continue
        last = node
        if bias is None:
            last, bias = _with_bias(node)
        elif not _is_bias(bias, w):
            continue
        with graph.graph.inserting_before(last):
            product = graph.graph.call_function(LINEAR, (x, w, bias))
        product.meta = {**last.meta, "val": LINEAR(*(each and each.meta["val"] for each in (x, w, bias)))}
        last.replace_all_uses_with(product)
        graph.graph.erase_node(last)
        if last is not node:
            graph.graph.erase_node(node)
        changed += 1
    return changed


def _is_tall(x: Any, w: Any) -> bool:
    left, right = (each.meta["val"] for each in (x, w))
    return bool(
        left.dtype is torch.float32
        and right.dtype is torch.float32
        and left.device.type == "cpu"
        and left.shape[0] >= MIN_ROWS
        and left.stride(1) == 1
        and min(*left.shape, *right.shape) > 0
        and right.numel() < left.numel()
    )


def _is_bias(bias: Any, w: Any) -> bool:
    if not isinstance(bias, fx.Node):
        return False
    value: Tensor = bias.meta["val"]
    return value.dtype is torch.float32 and value.shape == w.meta["val"].shape[1:]


def _with_bias(product: fx.Node) -> tuple[fx.Node, Any]:
    """Return the node that adds a bias to this product, if that is all that reads it, and the bias."""
    if len(product.users) == 1:
        (user,) = product.users
        others = [each for each in user.args if each is not product]
        plain = user.target is aten.add.Tensor and not user.kwargs
        if plain and len(others) == 1 and _is_bias(others[0], product.args[1]):
            return user, others[0]
    return product, None
