"""Simulated quantization of parameters: the forward and backward passes read values rounded to a grid.

The grid has `num_buckets` points from `low` to `high`: `low + i · (high − low) / (num_buckets − 1)`; what is outside is
clamped. The gradient of a rounded value is the parameter's own (a straight-through estimator, Bengio et al.
2013, arXiv:1308.3432), and the update reads and writes the parameter in full. Rows of a table are rounded after they
are looked up, so the cost follows the rows that a batch reads.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.edit import after, call
from twinstep.worker.compile.stages import stage
from twinstep.worker.compile.strategies import Quantize

aten = torch.ops.aten

_LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default}
"""Ops that pick rows of their first argument: rounding after them is rounding before them."""


def round_parameters(graph: fx.GraphModule, context: PassContext) -> int:
    """Round what is read of the parameters that the strategy names; return how many reads were.

    Raises:
        CompileError: a pattern names no parameter, or there is no table where none is named.
    """
    wanted = context.strategy(Quantize)
    assert wanted is not None  # noqa: S101
    found = _chosen(graph, context, wanted)
    changed = 0
    for placeholder in found.values():
        whole: fx.Node | None = None
        for user in _reads(placeholder):
            if user.target in _LOOKUPS and user.args[0] is placeholder:
                _round_readers(graph.graph, user, wanted)
            else:
                whole = whole or _rounded(graph.graph, placeholder, wanted, like=user)
                user.replace_input_with(placeholder, whole)
            changed += 1
    context.notes["quantize"] = {"parameters": sorted(found), "reads": changed}
    return changed


def _reads(placeholder: fx.Node) -> list[fx.Node]:
    """Return what reads a parameter before the update."""
    return [user for user in placeholder.users if user.op == "call_function" and stage(user) != "update"]


def _round_readers(graph: fx.Graph, rows: fx.Node, wanted: Quantize) -> None:
    before = list(rows.users)
    rounded = _rounded(graph, rows, wanted, like=rows)
    for user in before:
        user.replace_input_with(rows, rounded)


def _rounded(graph: fx.Graph, value: fx.Node, wanted: Quantize, *, like: fx.Node) -> fx.Node:
    """Add the nearest point of the grid to each element of `value`, right after it."""
    width = (wanted.high - wanted.low) / (wanted.num_buckets - 1)
    steps: tuple[tuple[Any, tuple[float, ...]], ...] = (
        (aten.add.Tensor, (-wanted.low,)),
        (aten.div.Tensor, (width,)),
        (aten.round.default, ()),
        (aten.clamp_min.default, (0,)),
        (aten.clamp_max.default, (wanted.num_buckets - 1,)),
        (aten.mul.Tensor, (width,)),
        (aten.add.Tensor, (wanted.low,)),
    )
    node = value
    with after(graph, value):
        for target, numbers in steps:
            node = call(graph, target, node, *numbers, like=like)
    return node


def _chosen(graph: fx.GraphModule, context: PassContext, wanted: Quantize) -> dict[str, fx.Node]:
    """Return the placeholders of the parameters that are to be rounded, by name."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = {
        slot.name: node
        for slot, node in zip(context.slots, placeholders, strict=False)
        if slot.role == "parameter" and node.meta["val"].is_floating_point()
    }
    if not wanted.parameters:
        tables = {name: node for name, node in parameters.items() if any(map(_is_lookup, _reads(node)))}
        if not tables:
            raise CompileError(
                "strategy quantize found no embedding table", remedy=f"name parameters: {', '.join(parameters)}"
            )
        return tables
    chosen: dict[str, fx.Node] = {}
    for pattern in wanted.parameters:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise CompileError(
                f"strategy quantize: no parameter is called {pattern!r}",
                remedy=f"use names or patterns of {', '.join(parameters)}",
            )
        chosen.update((name, parameters[name]) for name in names)
    return chosen


def _is_lookup(node: fx.Node) -> bool:
    return node.target in _LOOKUPS and len(node.args[0].meta["val"].shape) == 2  # type: ignore[union-attr]
