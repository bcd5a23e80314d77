"""What is changed in a step's graph for a TPU, where a step's time is mostly that of the bytes it moves.

`narrow` is called by `xla_trace.as_jax` on its own copy of the graph. It changes nothing of what a step computes, but
in which order sums are taken:

- A tall product that is read in parts, as STU's `x @ W` is for the gate, v, q and k, becomes one product per part. A
  fusion or kernel that reads a part of a wide tensor is handed the whole of it, or a copy.
- The sum over the rows of joined parts (the gradient of that product's bias) becomes the join of each part's sum, which
  the compiler takes where it makes the part, and attention's backward kernel where it makes gradients of q, k and v.
- The dense gradient of a narrow table is handed on in the layout that the table has in memory.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.experimental.layout import Layout, with_layout_constraint
from torch import fx

from twinstep.worker.compile.lower import pallas_attention
from twinstep.worker.compile.passes.edit import call
from twinstep.worker.ops.hstu_attention import OPERATOR_BACKWARD, AttentionRule

aten = torch.ops.aten

MIN_ROWS = 4096
"""Rows over all devices below which products stay as they are: what is read once more is as much as what is saved."""

LANES = 128
"""Floats of a tile's row: fewer columns leave the rest of it empty."""

Part = tuple[fx.Node, int, int]
"""A node that gives columns start…end of a product."""


def narrow(graph: fx.GraphModule) -> dict[str, int]:
    """Rewrite `graph` in place; return how often each was changed."""
    found = {"products": _split_products(graph.graph), "sums": _split_sums(graph.graph)}
    found["totals"] = _take_totals(graph.graph)
    found["tables"] = _lay_out_gradients(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return found


def _split_products(graph: fx.Graph) -> int:
    changed = 0
    for product in list(graph.find_nodes(op="call_function", target=aten.mm.default)):
        if product.meta["val"].shape[0] < MIN_ROWS:
            continue
        last, bias = _with_bias(product)
        parts = _parts(last)
        if len(parts) < 2 or _overlap(parts):
            continue
        for part in parts:
            _one_product(graph, product, last, bias, part)
        changed += 1
    return changed


def _with_bias(product: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the node that adds a bias per column to this product, if that is all that reads it, and the bias."""
    if len(product.users) == 1:
        (user,) = product.users
        if user.target is aten.add.Tensor and not user.kwargs and user.args[0] is product:
            bias = user.args[1]
            if isinstance(bias, fx.Node) and bias.meta["val"].shape == product.meta["val"].shape[1:]:
                return user, bias
    return product, None


def _parts(whole: fx.Node) -> list[Part]:
    """Return the parts by which alone a [M, E] value is read, in order; none if anything else reads it."""
    width = whole.meta["val"].shape[1]
    found: list[Part] = []
    for user in whole.users:
        if user.target is aten.split_with_sizes.default and user.args[2:] == (1,):
            start = 0
            for at, size in enumerate(user.args[1]):  # type: ignore[arg-type]
                found += [(each, start, start + size) for each in user.users if each.args[1] == at]
                start += size
        elif user.target is aten.slice.Tensor and len(user.args) == 4 and user.args[1] == 1:
            bounds: Any = user.args[2:]
            start, end = (min(each + width if each < 0 else each, width) for each in bounds)
            if not 0 <= start < end:
                return []
            found.append((user, start, end))
        else:
            return []
    return sorted(found, key=lambda part: part[1:])


def _overlap(parts: Sequence[Part]) -> bool:
    return any(later[1] < sooner[2] for sooner, later in itertools.pairwise(parts))


def _one_product(graph: fx.Graph, product: fx.Node, last: fx.Node, bias: fx.Node | None, part: Part) -> None:
    node, start, end = part
    x, weight = product.args
    with graph.inserting_before(last.next):
        columns = call(graph, aten.slice.Tensor, weight, 1, start, end, like=product)
        made = call(graph, aten.mm.default, x, columns, like=product)
        if bias is not None:
            some = call(graph, aten.slice.Tensor, bias, 0, start, end, like=last)
            made = call(graph, aten.add.Tensor, made, some, like=last)
    node.replace_all_uses_with(made)


def _split_sums(graph: fx.Graph) -> int:
    changed = 0
    for total in list(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        joined, over, *keep = total.args
        if not (isinstance(joined, fx.Node) and joined.target is aten.cat.default and joined.args[1:] == (1,)):
            continue
        value = joined.meta["val"]
        if over != [0] or total.kwargs or value.dim() != 2 or value.shape[0] < MIN_ROWS:
            continue
        with graph.inserting_before(total):
            sums = [call(graph, total.target, part, over, *keep, like=total) for part in joined.args[0]]  # type: ignore[union-attr]
            total.replace_all_uses_with(call(graph, aten.cat.default, sums, -1, like=total))
        changed += 1
    return changed


def _take_totals(graph: fx.Graph) -> int:
    """Let attention's backward kernel give the sums over all tokens that are taken of its gradients."""
    changed = 0
    for node in list(graph.find_nodes(op="call_function", target=OPERATOR_BACKWARD)):
        sums = [(each, total) for each in node.users for total in _sums_over_tokens(each)]
        if not sums:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(gradients_and_totals, node.args)
        made.meta = dict(node.meta)
        for each, total in sums:
            with graph.inserting_before(total):
                taken = graph.call_function(operator.getitem, (made, 3 + each.args[1]))
                taken.meta = {**total.meta, "val": total.meta["val"].flatten()}
                total.replace_all_uses_with(
                    call(graph, aten.view.default, taken, list(total.meta["val"].shape), like=total)
                )
            changed += 1
        node.replace_all_uses_with(made)
    return changed


def _sums_over_tokens(gradient: fx.Node) -> list[fx.Node]:
    """Return the sums over rows and slots of a gradient, [B, S, H, A], that views bring to [B · S, H · A]."""
    found, waiting = [], [gradient]
    B, S, H, A = gradient.meta["val"].shape
    while waiting:
        for user in waiting.pop().users:
            if user.target is aten.view.default:
                waiting.append(user)
            elif user.target is aten.sum.dim_IntList and _over_tokens(user, (B * S, H * A)):
                found.append(user)
    return found


def _over_tokens(total: fx.Node, shape: tuple[int, int]) -> bool:
    summed, over, *_ = total.args
    return over == [0] and not total.kwargs and summed.meta["val"].shape == shape  # type: ignore[union-attr]


def gradients_and_totals(*args: Any) -> tuple[jax.Array, ...]:
    """Return what `twinstep::hstu_attention_backward` gives, and the sums over rows and slots, [H · A or V]."""
    arrays, (*rule, alpha) = args[:7], args[7:]
    *grads, dq, dk, dv = pallas_attention.spread_backward(*arrays, AttentionRule(*rule), alpha, totals=True)
    return *grads, *(each.sum(0).reshape(-1) for each in (dq, dk, dv))


def _lay_out_gradients(graph: fx.Graph) -> int:
    """Hand a narrow table's dense gradient on in the layout that the table has in memory: column by column.

    Rows are added up row by row, and a row of 64 floats fills half of a tile of 128. Left to itself the compiler brings
    the table, twice, to the layout of its gradient.
    """
    changed = 0
    for scatter in list(graph.find_nodes(op="call_function", target=aten.index_put.default)):
        value = scatter.meta["val"]
        if value.dim() != 2 or value.shape[1] >= LANES or value.shape[0] < MIN_ROWS:
            continue
        with graph.inserting_before(scatter.next):
            laid = graph.call_function(by_columns, (scatter,))
        laid.meta = dict(scatter.meta)
        scatter.replace_all_uses_with(laid, delete_user_cb=lambda user, laid=laid: user is not laid)
        changed += 1
    return changed


def by_columns(x: jax.Array) -> jax.Array:
    """Return `x`, [R, E], laid out column by column."""
    laid: jax.Array = with_layout_constraint(x, Layout(major_to_minor=(1, 0)))  # type: ignore[no-untyped-call]
    return laid
