"""Passes that remove what changes nothing: copies where nothing is mutated, nodes that nobody reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.stages import hand_over

aten = torch.ops.aten


def drop_dead(graph: fx.GraphModule, _: PassContext) -> int:
    """Remove nodes that nobody reads."""
    before = len(graph.graph.nodes)
    graph.graph.eliminate_dead_code()
    return before - len(graph.graph.nodes)


def drop_writes(graph: fx.GraphModule, _: PassContext) -> int:
    """Turn `add_` and its like into `add`, and let what reads its target after it read the result.

    Decompositions that are applied after functionalization still write, to tensors of their own.

    Raises:
        CompileError: an op writes that has no like, or to a tensor that another shares its memory with.
    """
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    writes = [node for node in position if _is_op(node) and node.target._schema.is_mutable]
    for node in writes:
        target, at = node.args[0], position[node]
        like = _without_writing(node.target)
        viewed = any(_is_view(each) and any(position[user] > at for user in each.users) for each in target.users)
        if like is None or viewed or _is_view(target) or target.op == "placeholder":
            raise CompileError(
                f"{node.name} = {node.target} writes to a tensor, in a graph that can hold values only",
                remedy="use the op that returns its result (no underscore at its end)",
            )
        node.target = like
        if like is aten.bernoulli.p:
            node.args = (target, *(node.args[1:] or (0.5,)))  # what bernoulli_ takes where it is not told
        target.replace_all_uses_with(node, delete_user_cb=lambda user, at=at: position[user] > at)
    return len(writes)


def _without_writing(target: Any) -> Any:
    """Return the overload that returns what `target`, an op whose name ends in an underscore, writes; or None."""
    if target is aten.bernoulli_.float:
        return aten.bernoulli.p
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if target._schema.name.endswith("_") else None


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _is_view(node: fx.Node) -> bool:
    """Say whether a node's value shares memory with its argument; ops that write to it aside."""
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is not None and not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


_SAME_VALUE = {
    aten.alias.default: 0,
    aten.clone.default: 0,
    aten.copy.default: 1,
    aten.detach.default: 0,
    aten.lift_fresh_copy.default: 0,
}
"""Ops whose result is one of their arguments, by position, where nothing is mutated."""


def drop_copies(graph: fx.GraphModule, _: PassContext) -> int:
    """Replace a copy by what it is a copy of: nothing in the graph is mutated, so nobody can tell them apart.

    One that changes dtype, shape or strides stays.
    """
    changed = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _SAME_VALUE:
            continue
        source = node.args[_SAME_VALUE[node.target]]
        if _layout(source) == _layout(node):
            hand_over(node, source)
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            changed += 1
    return changed


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, tuple(value.shape), value.stride()


def lift_constants(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Turn tensors that the graph holds as attributes into placeholders after all others; return them in order."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    lifted: dict[str, fx.Node] = {}
    constants = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in lifted:
            value = _attribute(graph, name)
            with graph.graph.inserting_after(placeholders[-1]):
                lifted[name] = graph.graph.placeholder(f"constant_{len(lifted)}")
            lifted[name].meta = dict(node.meta)
            placeholders.append(lifted[name])
            constants.append(value.detach())
        node.replace_all_uses_with(lifted[name])
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(constants)


def _attribute(graph: fx.GraphModule, name: str) -> Tensor:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise CompileError(
            f"the graph holds {name}, a {type(value).__name__}, as a constant",
            remedy="write the step without torch.cond or sub-graphs",
        )
    return value
