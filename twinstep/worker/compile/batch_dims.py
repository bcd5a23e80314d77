"""Stage 3, annotate: follow the batch dimension through a captured graph, forward, backward and update.

A batch dimension is one whose length is `outer · B · inner` for the batch size B: `[B, S]` flattened is `[B·S]`, with
outer 1 and inner S. What grows with B is found by running each op on fake tensors with one more sample; ops that are
told sizes (views, `expand`, slices) have a rule each. A dimension about which nothing can be proved has no label:
unknown is allowed, wrong is not. Tests hold the labels against a second capture with another batch size.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from twinstep.worker.compile.batch_labels import (
    BatchDim,
    Dims,
    JoinedDim,
    Label,
    Labels,
    cut,
    joined,
    viewed,
)

aten = torch.ops.aten

_ROUNDS = 5  # each round lets sizes that were constants of the trace (a `full`, an `expand`) be known as batch


Source = tuple[fx.Node, int, Label]
"""A dimension of a node's value, and the label it must have."""


def follow(graph: fx.GraphModule, seeds: Mapping[fx.Node, Dims], batch: int) -> dict[fx.Node, Labels]:
    """Return the batch dimensions of every node's value.

    Args:
        graph: `node.meta["val"]` holds fake values.
        seeds: of the batch leaves' placeholders; all other placeholders have none.
        batch: B, at least 2.
    """
    follower = _Follower(graph, dict(seeds), batch)
    for _ in range(_ROUNDS):
        follower.run()
        if not follower.learned:
            break
    return follower.labels


@dataclass(slots=True)
class _Follower:
    graph: fx.GraphModule
    seeds: dict[fx.Node, Dims]
    batch: int
    labels: dict[fx.Node, Labels] = field(default_factory=dict)
    forced: dict[tuple[fx.Node, int], Label] = field(default_factory=dict)
    """Dimensions of constants and expansions that must be batch: an op joins them with one that is."""
    learned: bool = False
    _mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    _memo: dict[str, Labels] = field(default_factory=dict)
    _free: dict[tuple[fx.Node, int], bool] = field(default_factory=dict)

    def run(self) -> None:
        """Label all nodes in order."""
        self.learned = False
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.labels[node] = self.seeds.get(node) or _none(node.meta.get("val"))
            elif node.op == "call_function":
                self.labels[node] = self._with_forced(node, self._label(node))

    def _with_forced(self, node: fx.Node, labels: Labels) -> Labels:
        if not isinstance(node.meta.get("val"), Tensor):
            return labels
        return tuple(self.forced.get((node, index), label) for index, label in enumerate(_dims(labels)))

    def _label(self, node: fx.Node) -> Labels:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args[0], node.args[1]
            whole = self.labels.get(source) if isinstance(source, fx.Node) else None
            part = whole[index] if whole and isinstance(index, int) and index < len(whole) else None
            return part if isinstance(part, tuple) else _none(value)
        if not isinstance(node.target, torch._ops.OpOverload):
            return _none(value)
        packet = node.target.overloadpacket
        if packet in FACTORIES:
            return _none(value)
        rule = _RULES.get(packet)
        if rule is not None:
            return rule(self, node)
        return _pointwise(self, node) if torch.Tag.pointwise in node.target.tags else self._by_running(node)

    def of(self, node: Any) -> Dims:
        """Return the labels of an argument; () of what is no tensor."""
        return _dims(self.labels.get(node, ())) if isinstance(node, fx.Node) else ()

    def _by_running(self, node: fx.Node) -> Labels:
        """Run the op on one more sample, and see which lengths follow."""
        tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
        described: Callable[[fx.Node], Any] = lambda each: _Described(self, each)  # noqa: E731
        key = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), described)}"
        if key in self._memo:
            return self._memo[key]
        known = {each: self.of(each) for each in tensors}
        if not any(label for dims in known.values() for label in dims):
            result: Labels = _none(node.meta.get("val"))
        else:
            grown = self._grown(node, known)
            if grown is None:
                supposed = self._with_free(known)
                grown = self._grown(node, supposed) if supposed != known else None
                if grown is None:
                    return _none(node.meta.get("val"))
                self._force(supposed)
                return self._read(node, grown, supposed)  # not to be remembered: it holds for these very nodes
            result = self._read(node, grown, known)
        self._memo[key] = result
        return result

    def _with_free(self, known: Mapping[fx.Node, Dims]) -> dict[fx.Node, Dims]:
        """Suppose that every free dimension as long as a batch dimension beside it is one too."""
        sizes = {label.size(self.batch): label for dims in known.values() for label in dims if label}
        return {
            node: tuple(
                label or (sizes.get(size) if sizes.get(size) and self._is_free(node, index, sizes[size]) else None)
                for index, (label, size) in enumerate(zip(dims, node.meta["val"].shape, strict=True))
            )
            for node, dims in known.items()
        }

    def _force(self, known: Mapping[fx.Node, Dims]) -> None:
        for node, dims in known.items():
            for index, label in enumerate(dims):
                if label is not None and self.of(node)[index] is None:
                    self.force(node, index, label)

    def force(self, node: fx.Node, index: int, label: Label) -> None:
        """Label a free dimension, and what it comes from."""
        if (node, index) not in self.forced and self.of(node)[index] is None:
            self.forced[node, index] = label
            self.learned = True
            for source, at, its in self._sources(node, index, label) or ():
                self.force(source, at, its)

    def _is_free(self, node: fx.Node, index: int, label: Label) -> bool:
        if (node, index) not in self._free:
            sources = self._sources(node, index, label)
            self._free[node, index] = sources is not None and all(
                self.of(source)[at] == its or self._is_free(source, at, its) for source, at, its in sources
            )
        return self._free[node, index]

    def _sources(self, node: fx.Node, index: int, label: Label) -> list[Source] | None:
        """Return the dimensions that a dimension comes from; None where it has a length of its own."""
        if node.target is operator.getitem:
            whole, which = node.args[0], node.args[1]
            named = isinstance(whole, fx.Node) and isinstance(whole.target, torch._ops.OpOverload)
            return self._tried(whole, which, index, label) if named and isinstance(which, int) else None  # type: ignore[arg-type]
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        packet = node.target.overloadpacket
        if packet in FACTORIES:
            return []
        shape = node.meta["val"].shape
        if packet is aten.expand or torch.Tag.pointwise in node.target.tags:
            found: list[Source] = []
            for each in node.all_input_nodes:
                lengths = each.meta["val"].shape
                at = index - (len(shape) - len(lengths))
                if at >= 0 and lengths[at] == shape[index] != 1:
                    found.append((each, at, label))
            return found
        source = node.args[0] if node.args else None
        if packet is aten.cat and index == _argument(node, "dim", 1, 0) % len(shape):
            return _parts(node, index, label, self.batch)
        if not isinstance(source, fx.Node):
            return None
        if packet in _VIEWS:
            one = tuple(label if at == index else None for at in range(len(shape)))
            back = viewed(one, tuple(shape), tuple(source.meta["val"].shape), self.batch)
            return [(source, at, each) for at, each in enumerate(back) if each] or None
        return self._tried(node, None, index, label)

    def _tried(self, node: fx.Node, result: int | None, index: int, label: Label) -> list[Source] | None:
        """Return the one dimension of the op's arguments that, if it is batch, makes the result's dimension so."""
        known = {each: self.of(each) for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)}
        found: list[Source] = []
        for each, dims in known.items():
            for at, length in enumerate(each.meta["val"].shape):
                if dims[at] is None and length == label.size(self.batch):
                    supposed = tuple(label if other == at else had for other, had in enumerate(dims))
                    grown = self._grown(node, {**known, each: supposed})
                    grown = grown[result] if result is not None and isinstance(grown, tuple | list) else grown
                    long = label.size(self.batch + 1)
                    if isinstance(grown, Tensor) and grown.dim() > index and grown.shape[index] == long:
                        found.append((each, at, label))
        return found if len(found) == 1 else None

    def _grown(self, node: fx.Node, known: Mapping[fx.Node, Dims]) -> Any:
        """Return the op's result with one more sample; None where it refuses."""

        def grown(each: fx.Node) -> Any:
            value = each.meta.get("val")
            if not isinstance(value, Tensor):
                return value
            labels = known.get(each, (None,) * value.dim())
            shape = [
                label.size(self.batch + 1) if label else size for label, size in zip(labels, value.shape, strict=True)
            ]
            return torch.empty(shape, dtype=value.dtype, device=value.device)

        try:
            with self._mode, torch.no_grad(), _quiet():
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), grown)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # an op's fake may raise anything; what it refuses has no label
            return None

    def _read(self, node: fx.Node, grown: Any, known: Mapping[fx.Node, Dims]) -> Labels:
        labels = {label for dims in known.values() for label in dims if label}

        def read(before: Any, after: Any) -> Dims:
            if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.dim() != after.dim():
                return _none_of(before)
            return tuple(
                _only(each for each in labels if each.size(self.batch) == was and each.size(self.batch + 1) == now)
                if was != now
                else None
                for was, now in zip(before.shape, after.shape, strict=True)
            )

        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            if not isinstance(grown, tuple | list) or len(grown) != len(value):
                return _none(value)
            return tuple(read(was, now) for was, now in zip(value, grown, strict=True))
        return read(value, grown)


class _Described:
    """A tensor argument as a key of the memo."""

    def __init__(self, follower: _Follower, node: fx.Node) -> None:
        value = node.meta.get("val")
        known = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(type(value))
        self._text = f"{known} {[str(each) for each in follower.of(node)]}"

    def __repr__(self) -> str:
        return self._text


def _view(follower: _Follower, node: fx.Node) -> Labels:
    source: Any = node.args[0]
    old, new = tuple(source.meta["val"].shape), tuple(node.meta["val"].shape)
    return viewed(follower.of(source), old, new, follower.batch)


def _expand(follower: _Follower, node: fx.Node) -> Labels:
    source: Any = node.args[0]
    old, new = source.meta["val"].shape, node.meta["val"].shape
    lead = len(new) - len(old)
    known = follower.of(source)
    return tuple(
        known[index - lead] if index >= lead and old[index - lead] == size else None for index, size in enumerate(new)
    )


def _slice(follower: _Follower, node: fx.Node) -> Labels:
    """A part of the batch is no batch dimension: how long it would be with more samples, nobody can say.

    What `cat` joined, a slice may take apart.
    """
    source: Any = node.args[0]
    old, new = source.meta["val"].shape, node.meta["val"].shape
    known = follower.of(source)
    at = _argument(node, "dim", 1, 0) % len(old)
    found = [label if was == now else None for label, was, now in zip(known, old, new, strict=True)]
    whole = known[at]
    if isinstance(whole, JoinedDim) and old[at] != new[at] and _argument(node, "step", 4, 1) == 1:
        start = _argument(node, "start", 2, 0)
        found[at] = cut(whole, start + old[at] if start < 0 else start, new[at], follower.batch)
    return tuple(found)


def _parts(node: fx.Node, at: int, label: Label, batch: int) -> list[Source] | None:
    """Return which part of a joined dimension each of the tensors of a `cat` must be."""
    if not isinstance(label, JoinedDim):
        return None
    found, start = [], 0
    tensors: Any = node.args[0]
    for each in tensors:
        length = each.meta["val"].shape[at]
        part = cut(label, start, length, batch)
        if part is None:
            return None
        found.append((each, at, part))
        start += length
    return found


def _pointwise(follower: _Follower, node: fx.Node) -> Labels:
    """Two lengths that an op joins without broadcasting are equal at every batch size, or no other one is allowed."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return _none(value)
    found: list[set[Label]] = [set() for _ in value.shape]
    unlabelled: list[tuple[fx.Node, int, int]] = []
    for each in node.all_input_nodes:
        lengths = each.meta["val"].shape
        for at, (label, length) in enumerate(zip(follower.of(each), lengths, strict=True)):
            index = at + value.dim() - len(lengths)
            if label is not None:
                found[index].add(label)
            elif length == value.shape[index] != 1:
                unlabelled.append((each, at, index))
    result = tuple(_only(iter(labels)) for labels in found)
    for each, at, index in unlabelled:
        label = result[index]
        if label is not None and follower._is_free(each, at, label):
            follower.force(each, at, label)
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging that an op refused what it was given to see whether it would."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _cat(follower: _Follower, node: fx.Node) -> Labels:
    tensors: Any = node.args[0]
    at = _argument(node, "dim", 1, 0) % node.meta["val"].dim()
    parts = [each for each in tensors if each.meta["val"].dim() == node.meta["val"].dim()]
    lengths = [follower.of(each)[at] or (each.meta["val"].shape[at] if _fixed(each, at) else None) for each in parts]
    along = None if None in lengths else joined([length for length in lengths if length is not None])
    others = _dims(follower._by_running(node))
    return tuple(along if index == at else label for index, label in enumerate(others))


def _fixed(node: fx.Node, at: int) -> bool:
    """Say whether a value's lengths are those of the state: `no label` alone may also mean that nobody knows."""
    if node.meta["val"].shape[at] == 1 and getattr(node.target, "overloadpacket", None) in FACTORIES:
        return True
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in _VIEWS:
            return False
        node = node.args[0]
    return node.op == "placeholder"


def _split(follower: _Follower, node: fx.Node) -> Labels:
    source: Any = node.args[0]
    sizes: Any = node.args[1]
    known = follower.of(source)
    at = _argument(node, "dim", 2, 0) % len(known)
    whole = known[at]
    found: list[Dims] = []
    start = 0
    for size in sizes:
        part = cut(whole, start, size, follower.batch) if isinstance(whole, JoinedDim) else None
        found.append((*known[:at], part, *known[at + 1 :]))
        start += size
    return tuple(found)


def _padded(follower: _Follower, node: fx.Node) -> Labels:
    source: Any = node.args[0]
    pads: Any = node.args[1]
    labels = list(follower.of(source))
    for index, label in enumerate(labels):
        place = 2 * (len(labels) - 1 - index)
        before, after = pads[place : place + 2] if place + 1 < len(pads) else (0, 0)
        if label is not None and (before or after):
            parts = [before, label, after]
            whole = before >= 0 and after >= 0
            labels[index] = joined([part for part in parts if part]) if whole else None
    return tuple(labels)


def _select_scatter(follower: _Follower, node: fx.Node) -> Labels:
    into: Any = node.args[0]
    at = _argument(node, "dim", 2, 0) % into.meta["val"].dim()
    part = list(follower.of(node.args[1]))
    return _merged(follower, into, [*part[:at], None, *part[at:]])


def _slice_scatter(follower: _Follower, node: fx.Node) -> Labels:
    into: Any = node.args[0]
    part: Any = node.args[1]
    sizes = zip(follower.of(part), part.meta["val"].shape, into.meta["val"].shape, strict=True)
    return _merged(follower, into, [label if of_part == whole else None for label, of_part, whole in sizes])


def _merged(follower: _Follower, into: fx.Node, part: Sequence[Label | None]) -> Labels:
    """Return the labels of a tensor that a part was written into; constants it was made of learn from the part."""
    labels = follower.of(into)
    for index, (own, other) in enumerate(zip(labels, part, strict=True)):
        if own is None and other is not None and follower._is_free(into, index, other):
            follower.force(into, index, other)
    return tuple(own or other for own, other in zip(labels, part, strict=True))


def _argument(node: fx.Node, name: str, position: int, default: int) -> int:
    found: Any = node.kwargs.get(name, node.args[position] if len(node.args) > position else default)
    return int(found)


def _only(found: Iterator[Label]) -> Label | None:
    labels = list(found)
    return labels[0] if len(labels) == 1 else None


def _dims(labels: Labels) -> Dims:
    """Return the labels of a node with one result."""
    return tuple(each if isinstance(each, BatchDim | JoinedDim) else None for each in labels)


def _none(value: Any) -> Labels:
    return tuple(_none_of(each) for each in value) if isinstance(value, tuple | list) else _none_of(value)


def _none_of(value: Any) -> Dims:
    return (None,) * value.dim() if isinstance(value, Tensor) else ()


_VIEWS = frozenset(
    {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze, aten.squeeze, aten.view_copy}
)
FACTORIES = frozenset(
    {
        aten.full,
        aten.empty,
        aten.empty_strided,
        aten.empty_permuted,
        aten.zeros,
        aten.ones,
        aten.rand,
        aten.randn,
        aten.arange,
        aten.scalar_tensor,
        torch.ops.prims.iota,
    }
)
"""Ops that take sizes, or a length, and no tensor: nothing in them says which size is the batch."""

_RULES: dict[Any, Callable[[_Follower, fx.Node], Labels]] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.expand: _expand,
    aten.slice: _slice,
    aten.cat: _cat,
    aten.split_with_sizes: _split,
    aten.constant_pad_nd: _padded,
    aten.as_strided: lambda _, node: _none(node.meta.get("val")),
    aten.select_scatter: _select_scatter,
    aten.slice_scatter: _slice_scatter,
}
"""Ops that are told sizes or positions, which would not follow the batch by themselves."""
