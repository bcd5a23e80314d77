"""Fold repeated layers: one region, run L times, instead of L copies of it.

Works on the copy of the graph that is lowered. A run of equal regions (`repeats.py`) becomes one node that calls a
`Repeated` module; each backend decides how to run it: Inductor compiles the body once and calls it L times, XLA makes
it a `jax.lax.scan`. Values that a layer's forward pass leaves for its backward pass leave one region and enter another.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from twinstep.worker.compile.passes.repeats import Region, Role, find_region, reads
from twinstep.worker.compile.strategies import FoldLayers

aten = torch.ops.aten

HEAVY = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward})
"""Ops that make a region worth a call of its own; ops of Twinstep's own count too."""

_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


class Repeated(nn.Module):
    """A region and how its repeats hang together; called as it stands, it runs them one after the other.

    Arguments: `num_carried` values for the first repeat, `num_same` for all, then `num_each` for each repeat in turn.
    Returns the body's outputs of each repeat in turn, as one flat tuple.
    """

    def __init__(self, body: fx.GraphModule, *, count: int, carried: Sequence[int], num_each: int) -> None:
        super().__init__()
        self.body = body
        """Takes carried, each, same; returns a tuple."""
        self.count = count
        """Repeats."""
        self.carried = tuple(carried)
        """The output that each carried input is taken from in the next repeat."""
        self.num_each = num_each

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[list[Any]]]:
        """Return the arguments as carried, same, and each by repeat."""
        stop = len(values) - self.count * self.num_each
        carried, same = list(values[: len(self.carried)]), list(values[len(self.carried) : stop])
        each = [list(values[at : at + self.num_each]) for at in range(stop, len(values), self.num_each or 1)]
        return carried, same, each or [[] for _ in range(self.count)]

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Run all repeats."""
        carried, same, each = self.split(values)
        results: list[Any] = []
        for own in each:
            found = self.body(*carried, *own, *same)
            carried = [found[at] for at in self.carried]
            results += found
        return tuple(results)


def fold_layers(graph: fx.GraphModule, strategy: FoldLayers) -> dict[str, Any]:
    """Fold every run of repeated regions that can be proven; return what was folded, and why others were left."""
    _give_own_views(graph.graph)
    folded: list[dict[str, Any]] = []
    refused: dict[fx.Node, str] = {}
    fewest = {"min_repeats": strategy.min_repeats, "min_nodes": strategy.min_nodes}
    while (region := find_region(graph.graph, HEAVY, **fewest, refused=refused)) is not None:
        number = len(folded)
        _replace(graph, region, f"repeated_{number}")
        folded.append(
            {
                "repeats": region.count,
                "nodes": region.length,
                "carried": len(region.carried),
                "each": len(region.each),
                "same": len(region.same),
                "outputs": len(region.outputs),
            }
        )
    graph.graph.lint()
    graph.recompile()
    return {"folded": folded, "left": sorted(set(refused.values()))}


def _replace(graph: fx.GraphModule, region: Region, name: str) -> None:
    """Put one call of a Repeated module in place of the region's nodes."""
    carried = [region.outputs.index(at) for _, at in region.carried]
    body = _body(region)
    graph.add_submodule(name, Repeated(body, count=region.count, carried=carried, num_each=len(region.each)))
    arguments = [role[0] for role, _ in region.carried] + [role[0] for role in region.same]
    arguments += [role[repeat] for repeat in range(region.count) for role in region.each]
    first = region.windows[0][0]
    with graph.graph.inserting_before(first):
        call = graph.graph.call_module(name, tuple(arguments))
        call.meta["val"] = tuple(window[at].meta["val"] for window in region.windows for at in region.outputs)
        inside = {node for window in region.windows for node in window}
        flat = [window[at] for window in region.windows for at in region.outputs]
        for number, node in enumerate(flat):
            outside = [user for user in node.users if user not in inside]
            if outside:
                got = graph.graph.call_function(operator.getitem, (call, number))
                got.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(got, delete_user_cb=lambda user: user not in inside)
    for window in reversed(region.windows):
        for node in reversed(window):
            graph.graph.erase_node(node)


def _body(region: Region) -> fx.GraphModule:
    """Return the first repeat as a module of its own: carried, each, same → outputs."""
    body = fx.Graph()
    inputs: dict[Role, fx.Node] = {}
    for number, role in enumerate((*(role for role, _ in region.carried), *region.each, *region.same)):
        inputs[role] = body.placeholder(f"input_{number}")
        inputs[role].meta["val"] = role[0].meta["val"]
    new: dict[fx.Node, fx.Node] = {}
    for row in zip(*region.windows, strict=True):
        # Which input an argument is, only all repeats together tell: one node may be two inputs to the first.
        roles = zip(*(reads(node) for node in row), strict=True)
        arguments = iter([inputs.get(role) or new[role[0]] for role in roles])
        new[row[0]] = body.node_copy(row[0], lambda _, given=arguments: next(given))  # type: ignore[misc]
        new[row[0]].meta = dict(row[0].meta)
    body.output(tuple(new[region.windows[0][at]] for at in region.outputs))
    body.lint()
    return fx.GraphModule(nn.Module(), body)


def _give_own_views(graph: fx.Graph) -> None:
    """Give each reader of a view of a placeholder a view of its own, right before it.

    A transposed weight that forward and backward share would else leave one region and enter the other, as a copy.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target in _VIEWS:
            continue
        for source in node.all_input_nodes:
            chain = _view_chain(source)
            if chain:
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_chain(graph, chain))
    for node in reversed(list(graph.nodes)):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)


def _view_chain(node: fx.Node) -> list[fx.Node]:
    """Return the views from a placeholder to `node`, first to last; none where it is no view of a placeholder."""
    chain = []
    while node.op == "call_function" and node.target in _VIEWS:
        chain.append(node)
        source = node.args[0]
        assert isinstance(source, fx.Node), "a view is of a tensor"  # noqa: S101
        node = source
    return chain[::-1] if node.op == "placeholder" else []


def _copy_chain(graph: fx.Graph, chain: Sequence[fx.Node]) -> fx.Node:
    """Copy a chain of views, less what comes back to where it was."""
    at = chain[0].args[0]
    assert isinstance(at, fx.Node), "a view is of a tensor"  # noqa: S101
    path = [at]
    for view in chain:
        same = next((node for node in path if _is_same(node, view, chain)), None)
        if same is not None:
            del path[path.index(same) + 1 :]
            continue
        copied = graph.node_copy(view, lambda _: path[-1])
        path.append(copied)
    return path[-1]


def _is_same(node: fx.Node, view: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Say whether `view` shows all that `node` does, in the same layout: only transpositions stand between the two."""
    only_turned = all(each.target in (aten.permute.default, aten.t.default, aten.transpose.int) for each in chain)
    value, other = node.meta["val"], view.meta["val"]
    if not only_turned or not isinstance(value, Tensor) or node.op != "placeholder":
        return False
    return value.shape == other.shape and value.stride() == other.stride() and len(set(value.stride())) == value.dim()
