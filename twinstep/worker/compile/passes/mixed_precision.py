"""Mixed precision: matrix products read bfloat16 and accumulate in float32; everything else stays float32.

Parameters are the master weights: the update reads and writes them in full. What is added to a product (a bias), norms,
softmax, losses and every other sum stay float32, so no loss scale is needed: bfloat16 has float32's range (Kalamkar et
al. 2019, arXiv:1905.12322). A value that several products read is cast once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.edit import after, call, cast
from twinstep.worker.compile.strategies import MixedPrecision

aten = torch.ops.aten

_PRODUCTS: dict[str, tuple[int, ...]] = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "twinstep::hstu_attention": (0, 1, 2),
    "twinstep::hstu_attention_backward": (0, 1, 2, 3),
}
"""Matrix products by name, and the positions of the arguments that are multiplied."""

_WITH_SUM: dict[Any, Any] = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}
"""Products that add a tensor to the result, and the product alone."""

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
}
"""Ops that move no value into another: a cast before them is one after them."""

_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_NARROW = torch.bfloat16


def narrow_products(graph: fx.GraphModule, context: PassContext) -> int:
    """Let every float32 matrix product read bfloat16; return how many do so now."""
    assert context.strategy(MixedPrecision) is not None  # noqa: S101
    casts = _Casts(graph.graph, context.backend)
    count = 0
    for node in list(graph.graph.nodes):
        if node.target in _WITH_SUM and node.meta["val"].dtype is torch.float32:
            node = _split_sum(graph.graph, node)
            if node is None:
                continue
        positions = _PRODUCTS.get(_name(node))
        if positions is None or any(_dtype(node.args[at]) is not torch.float32 for at in positions):
            continue
        for at in positions:
            node.update_arg(at, casts.narrow(node.args[at]))
        casts.widen(node)
        count += 1
    graph.graph.eliminate_dead_code()
    context.notes["mixed_precision"] = {"products": count, "values cast": casts.count}
    return count


def _split_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Write `a + x @ y` as a product and a sum, and return the product; None where either is scaled."""
    if len(node.args) > 3 or node.kwargs:
        return None
    added, left, right = node.args
    with graph.inserting_before(node):
        product = call(graph, _WITH_SUM[node.target], left, right, like=node)
        total = call(graph, aten.add.Tensor, added, product, like=node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return product


class _Casts:
    """The casts of one graph, each made once."""

    def __init__(self, graph: fx.Graph, backend: str) -> None:
        self.count = 0
        self._graph, self._backend = graph, backend
        self._narrow: dict[fx.Node, fx.Node] = {}

    def narrow(self, value: Any) -> fx.Node:
        """Return `value` in bfloat16: its cast, or a view of the cast of what it is a view of."""
        if value not in self._narrow:
            if value.target in _CASTS and _dtype(value.args[0]) is _NARROW:
                return value.args[0]  # type: ignore[no-any-return]
            if value.target in _VIEWS:
                source = self.narrow(value.args[0])
                with after(self._graph, value):
                    made = call(self._graph, value.target, source, *value.args[1:], like=value, **value.kwargs)
            else:
                with after(self._graph, value):
                    made = cast(self._graph, value, _NARROW, backend=self._backend, like=value)
                self.count += 1
            self._narrow[value] = made
        return self._narrow[value]

    def widen(self, product: fx.Node) -> None:
        """Let `product`, whose arguments were narrowed, say so, and its readers read it in float32."""
        mode = product.meta["val"][0].fake_mode if _is_tuple(product) else product.meta["val"].fake_mode
        args, kwargs = fx.map_arg((product.args, product.kwargs), lambda each: each.meta["val"])
        with mode:
            product.meta["val"] = product.target(*args, **kwargs)  # type: ignore[operator]
        results = [product]
        if _is_tuple(product):
            results = [user for user in product.users if user.target is operator.getitem]
            for each in results:
                each.meta["val"] = product.meta["val"][each.args[1]]
        for each in results:
            if _dtype(each) is _NARROW:
                with after(self._graph, each):
                    wide = cast(self._graph, each, torch.float32, backend=self._backend, like=each)
                for user in [user for user in each.users if user is not wide]:
                    user.replace_input_with(each, wide)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _dtype(node: Any) -> torch.dtype | None:
    return getattr(node.meta["val"], "dtype", None) if isinstance(node, fx.Node) else None
