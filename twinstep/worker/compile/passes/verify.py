"""What must hold of a graph after every pass: an error names the pass that broke it, before anything is lowered.

What a pass leaves must be well-formed (`Graph.lint`), have the inputs and outputs it had, write to nothing, and say
of each value (`node.meta["val"]`: shape and dtype) what its op really gives. The last is asked of the nodes that the
pass changed and of their users only; what all others say is unchanged and was checked before, so the whole graph
agrees, by induction, at a cost that follows what the pass did.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from twinstep.spec.errors import CompileError

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True)
class Before:
    """What `check` compares with: the graph as it was before a pass."""

    placeholders: tuple[tuple[str, Any], ...]
    """Name and form of each, in order."""
    outputs: tuple[Any, ...]
    """Form of each output; None for one that is no tensor."""
    calls: dict[fx.Node, tuple[Any, ...]]
    """Each node's op, arguments and value."""

    @classmethod
    def of(cls, graph: fx.GraphModule) -> Before:
        """Remember `graph`."""
        nodes = graph.graph.nodes
        return cls(
            placeholders=tuple((node.name, _form(node)) for node in nodes if node.op == "placeholder"),
            outputs=tuple(_form(each) for each in _results(graph)),
            calls={node: _call(node) for node in nodes},
        )


def check(graph: fx.GraphModule, before: Before, name: str, *, functional: bool) -> None:
    """Hold `graph`, which pass `name` left, against `before`.

    Args:
        functional: whether the graph may mutate nothing and its nodes must know their values; so after
            functionalization.

    Raises:
        CompileError: what is wrong, and the pass's name.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise _broken(name, f"is malformed: {str(error)[:200].splitlines()[0]}") from error
    _check_ends(graph, before, name)
    if functional:
        changed = [node for node in graph.graph.nodes if before.calls.get(node) != _call(node)]
        for node in changed:
            _check_functional(node, name)
        for affected in dict.fromkeys(each for node in changed for each in (node, *node.users)):
            _check_value(affected, name)


def check_all(graph: fx.GraphModule, name: str) -> None:
    """Hold every node of a functional graph against what its op gives: what `check` builds on.

    Raises:
        CompileError: the first node that disagrees.
    """
    for node in graph.graph.nodes:
        _check_functional(node, name)
        _check_value(node, name)


def _check_ends(graph: fx.GraphModule, before: Before, name: str) -> None:
    """Compare inputs and outputs: a program is called with, and read by, the positions that capture gave them."""
    placeholders = [(node.name, _form(node)) for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(before.placeholders):
        raise _broken(name, f"takes {len(placeholders)} inputs, not {len(before.placeholders)}")
    for index, (now, was) in enumerate(zip(placeholders, before.placeholders, strict=True)):
        if now != was:
            raise _broken(name, f"takes {_text(*now)} as input {index}, where it took {_text(*was)}")
    outputs = [_form(each) for each in _results(graph)]
    if len(outputs) != len(before.outputs):
        raise _broken(name, f"gives {len(outputs)} outputs, not {len(before.outputs)}")
    for index, (form, was_form) in enumerate(zip(outputs, before.outputs, strict=True)):
        if form != was_form:
            raise _broken(name, f"gives {_text('', form)} as output {index}, where it gave {_text('', was_form)}")


def _check_functional(node: fx.Node, name: str) -> None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        raise _broken(name, f"writes to a tensor: {node.name} = {target}")
    if node.op == "call_function" and "val" not in node.meta:
        raise _broken(name, f"does not say what {node.name} = {target} gives: meta['val'] is missing")


def _check_value(node: fx.Node, name: str) -> None:
    if node.op != "call_function" or not (node.target is operator.getitem or _is_op(node.target)):
        return  # a sub-graph's own nodes are checked where it is lowered
    mode = _mode(node)
    if mode is None:
        return
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        with mode:
            given = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # whatever an op's shape rule raises of arguments it does not take
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise _broken(name, f"has {node.name} = {node.target}, which its arguments do not fit: {line}") from error
    # A part that an op was told to leave out (a convolution's gradient for its input) is None, and has no value.
    for said, real in itertools.zip_longest(_tensors(node.meta.get("val")), _tensors(given)):
        if said != real:
            raise _broken(name, f"says {_text(node.name, said)}, but {node.target} gives {_text('', real)}")


def _is_op(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def _mode(node: fx.Node) -> FakeTensorMode | None:
    """Return the fake mode that the node's value, or an argument's, was made in."""
    for each in (node, *node.all_input_nodes):
        for value in pytree.tree_leaves(each.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    return None


def _results(graph: fx.GraphModule) -> Sequence[Any]:
    results: Any = graph.graph.output_node().args[0]
    return results if isinstance(results, tuple | list) else (results,)


def _call(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs, id(node.meta.get("val"))


def _form(node: Any) -> Form | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _tensors(value: Any) -> Iterator[Form]:
    return ((tuple(each.shape), each.dtype) for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


def _text(name: str, form: Form | None) -> str:
    shown = "no tensor" if form is None else f"{list(form[0])} {str(form[1]).removeprefix('torch.')}"
    return f"{name} {shown}".strip()


def _broken(name: str, problem: str) -> CompileError:
    return CompileError(
        f"the graph after pass {name!r} {problem}",
        remedy="this is a bug of the pass; leave its strategy out, or set compile.backend: eager meanwhile",
    )
