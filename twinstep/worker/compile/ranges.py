"""Ranges of values, known from a graph alone: which indices name a row whatever the batch holds.

`Ranges(graph)[node]` is the least and the greatest number a node's values can be. It is wide where no rule knows the
op, and says nothing of NaN. `ids % rows`, `ids.clamp(0, rows - 1)`, an `argmax` or a mask are within bounds as made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims
Range = tuple[float, float]
INF = math.inf
ANY: Range = (-INF, INF)


class Ranges:
    """Ranges of a graph's nodes, found when asked for.

    Args:
        least, most: of an integer that goes into the graph.
    """

    def __init__(self, least: float = -INF, most: float = INF) -> None:
        self._found: dict[fx.Node, Range] = {}
        self._given = (least, most)

    def __getitem__(self, value: Any) -> Range:
        """Return the range of a node, or of a number."""
        if isinstance(value, bool | int | float):
            return (value, value)
        if not isinstance(value, fx.Node):
            return ANY
        waiting = [value]
        while waiting:  # not by recursion: graphs are deep
            node = waiting[-1]
            unknown = [each for each in node.all_input_nodes if each not in self._found and node.op == "call_function"]
            if node in self._found or not unknown:
                waiting.pop()
                self._found.setdefault(node, self._of(node))
            else:
                waiting += unknown
        return self._found[value]

    def _of(self, node: fx.Node) -> Range:
        least, most = _of_dtype(node.meta.get("val"))
        if node.op == "placeholder":
            is_wide = least == -INF and not node.meta["val"].dtype.is_floating_point
            return self._given if is_wide else (least, most)
        if node.op != "call_function" or not (
            isinstance(node.meta.get("val"), Tensor) or node.target is operator.getitem
        ):
            return ANY
        if node.target is operator.getitem:
            low, high = self._of_part(node)
            return max(low, least), min(high, most)
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        try:
            low, high = ANY if rule is None else rule(self, node, *node.args)
        except (TypeError, IndexError, AttributeError, KeyError, ValueError, ArithmeticError):  # another overload
            low, high = ANY
        low, high = (-INF if math.isnan(low) else low), (INF if math.isnan(high) else high)
        if not _is_integer(node):
            low, high = _rounded_out(low, high, node.meta["val"].dtype)
        return max(low, least), min(high, most)

    def _of_part(self, node: fx.Node) -> Range:
        source: Any = node.args[0]
        rule = _PARTS.get((getattr(source.target, "overloadpacket", None), node.args[1]))
        if rule is not None:
            return rule(self, source, *source.args)
        if getattr(source.target, "overloadpacket", None) in (aten.split, aten.split_with_sizes, aten.unbind):
            return self[source.args[0]]
        return ANY

    def where(self, condition: Any, value: Any) -> Range:
        """Return the range of `value` where a condition holds, as far as it compares that very value with a number."""
        low, high = self[value]
        if not isinstance(condition, fx.Node) or condition.op != "call_function":
            return low, high
        packet = getattr(condition.target, "overloadpacket", None)
        if packet in (aten.logical_and, aten.bitwise_and):
            for each in condition.args:
                other = self.where(each, value)
                low, high = max(low, other[0]), min(high, other[1])
        elif packet in _COMPARED and _same(condition.args[0], value):
            below, step = _COMPARED[packet]
            least, most = self[condition.args[1]]
            step = step if _is_integer(value) else 0
            low, high = (low, min(high, most - step)) if below else (max(low, least + step), high)
        return low, high


def _same(left: Any, right: Any) -> bool:
    return left is right


def _is_integer(value: Any) -> bool:
    dtype = value.meta["val"].dtype if isinstance(value, fx.Node) else torch.float32
    return not (dtype.is_floating_point or dtype.is_complex)


def _of_dtype(value: Any) -> Range:
    """Return what a dtype of one byte can hold; a wider one holds too much to be of use."""
    if not isinstance(value, Tensor):
        return ANY
    if value.dtype is torch.bool:
        return (0, 1)
    if value.dtype in (torch.uint8, torch.int8, torch.int16):
        info = torch.iinfo(value.dtype)
        return (info.min, info.max)
    return ANY


def _rounded_out(low: float, high: float, dtype: torch.dtype) -> Range:
    """Widen a range by what a dtype's rounding may add: nothing where both ends are numbers of it."""
    if not dtype.is_floating_point:
        return ANY
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    ends = [
        each if _holds(each, dtype) else each + sign * (2 * eps * abs(each) + tiny)
        for each, sign in ((low, -1), (high, 1))
    ]
    return ends[0], ends[1]


def _holds(number: float, dtype: torch.dtype) -> bool:
    return abs(number) == INF or float(torch.tensor(number, dtype=dtype)) == number


def _union(*ranges: Range) -> Range:
    return min(each[0] for each in ranges), max(each[1] for each in ranges)


def _times(left: float, right: float) -> float:
    return 0 if left == 0 or right == 0 else left * right


def _product(left: Range, right: Range) -> Range:
    corners = [_times(one, other) for one in left for other in right]
    return min(corners), max(corners)


def _add(ranges: Ranges, node: fx.Node, left: Any, right: Any) -> Range:
    (low, high), (least, most) = ranges[left], _product(ranges[right], ranges[node.kwargs.get("alpha", 1)])
    return low + least, high + most


def _sub(ranges: Ranges, node: fx.Node, left: Any, right: Any) -> Range:
    (low, high), (least, most) = ranges[left], _product(ranges[right], ranges[node.kwargs.get("alpha", 1)])
    return low - most, high - least


def _clamp(ranges: Ranges, node: fx.Node, value: Any, least: Any = None, most: Any = None) -> Range:
    low, high = ranges[value]
    if least is not None:
        low, high = max(low, ranges[least][0]), max(high, ranges[least][1])
    if most is not None:
        low, high = min(low, ranges[most][0]), min(high, ranges[most][1])
    return low, high


def _remainder(ranges: Ranges, node: fx.Node, value: Any, divisor: Any) -> Range:
    least, most = ranges[divisor]
    if least <= 0:
        return ANY
    return (0, most - 1) if _is_integer(node) else (0, most)


def _fmod(ranges: Ranges, node: fx.Node, value: Any, divisor: Any) -> Range:
    (low, high), (least, most) = ranges[value], ranges[divisor]
    if least <= 0:
        return ANY
    most = most - 1 if _is_integer(node) else most
    return max(-most, min(low, 0)), min(most, max(high, 0))


def _div(ranges: Ranges, node: fx.Node, value: Any, divisor: Any) -> Range:
    (low, high), (least, most) = ranges[value], ranges[divisor]
    if least <= 0:
        return ANY
    found = [each / by for each in (low, high) if abs(each) != INF for by in (least, most) if by != INF]
    found += [each for each in (low, high) if abs(each) == INF] + ([0.0] if most == INF else [])
    mode = node.kwargs.get("rounding_mode")
    if mode is not None and not _is_integer(node):  # what is a hair below a whole number may be that number
        dtype = node.meta["val"].dtype
        found = [end for each in found for end in _rounded_out(each * (1 - 1e-12), each * (1 + 1e-12), dtype)]
    if mode == "floor" or node.target in (aten.floor_divide.default, aten.floor_divide.Scalar):
        found = [each if abs(each) == INF else math.floor(each) for each in found]
    elif mode == "trunc":
        found = [each if abs(each) == INF else math.trunc(each) for each in found]
    return min(found), max(found)


def _where(ranges: Ranges, node: fx.Node, condition: Any, value: Any, other: Any) -> Range:
    return _union(ranges.where(condition, value), ranges[other])


def _and(ranges: Ranges, node: fx.Node, left: Any, right: Any) -> Range:
    highs = [high for low, high in (ranges[left], ranges[right]) if low >= 0]
    return (0, min(highs)) if highs and _is_integer(node) else ANY


def _cat(ranges: Ranges, node: fx.Node, values: Sequence[Any], *_: Any) -> Range:
    return _union(*(ranges[each] for each in values))


def _numel(node: Any) -> int:
    return int(node.meta["val"].numel())


def _summed(ranges: Ranges, node: fx.Node, value: Any, *_: Any) -> Range:
    low, high = ranges[value]
    count = max(1, _numel(value) // max(1, _numel(node)) if node.target is not aten.cumsum.default else _numel(value))
    return min(low, _times(count, low)), max(high, _times(count, high))


def _convert(ranges: Ranges, node: fx.Node, value: Any, *_: Any) -> Range:
    low, high = ranges[value]
    if not _is_integer(node) or _is_integer(value):
        return low, high
    return (low if abs(low) == INF else math.trunc(low)), (high if abs(high) == INF else math.trunc(high))


def _rounded(function: Callable[[float], float]) -> Callable[..., Range]:
    def rule(ranges: Ranges, node: fx.Node, value: Any, *_: Any) -> Range:
        low, high = (each if abs(each) == INF else function(each) for each in ranges[value])
        return low, high

    return rule


def _sqrt(ranges: Ranges, node: fx.Node, value: Any) -> Range:
    low, high = ranges[value]
    return (math.sqrt(max(low, 0)) if low < INF else 0), (INF if high == INF else math.sqrt(max(high, 0)))


def _abs(ranges: Ranges, node: fx.Node, value: Any) -> Range:
    low, high = ranges[value]
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _neg(ranges: Ranges, node: fx.Node, value: Any) -> Range:
    low, high = ranges[value]
    return -high, -low


def _largest(ranges: Ranges, node: fx.Node, left: Any, right: Any) -> Range:
    (low, high), (least, most) = ranges[left], ranges[right]
    return max(low, least), max(high, most)


def _least(ranges: Ranges, node: fx.Node, left: Any, right: Any) -> Range:
    (low, high), (least, most) = ranges[left], ranges[right]
    return min(low, least), min(high, most)


def _arange(ranges: Ranges, node: fx.Node, *_: Any) -> Range:
    values = node.args
    if node.target is prims.iota.default:
        length, start, step = values[0], node.kwargs["start"], node.kwargs["step"]
        last = start + (length - 1) * step  # type: ignore[operator]
    else:
        start, end, step = (0, values[0], 1) if len(values) == 1 else (*values, 1)[:3]
        last = start + (_numel(node) - 1) * step  # type: ignore[operator]
        del end
    return (min(start, last), max(start, last)) if _numel(node) else (0, 0)  # type: ignore[type-var, return-value]


def _places(ranges: Ranges, node: fx.Node, value: Any, *args: Any) -> Range:
    """Of what finds places along a dimension: `argmax(x, dim)`, `topk(x, k, dim)[1]`."""
    shape = value.meta["val"].shape
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet in (aten.argmax, aten.argmin):
        dim = args[0] if args else None
        return (0, _numel(value) - 1) if dim is None else (0, shape[dim] - 1)
    at = 1 if packet in (aten.topk, aten.kthvalue) else 0
    dim = args[at] if len(args) > at else node.kwargs.get("dim", -1)
    return 0, (shape[dim] - 1 if shape else 0)


def _edges(ranges: Ranges, node: fx.Node, value: Any, edges: Any, *_: Any) -> Range:
    if node.target.overloadpacket is aten.searchsorted:  # type: ignore[union-attr]
        value, edges = edges, value
    return 0, edges.meta["val"].shape[-1]


def _drawn(ranges: Ranges, node: fx.Node, *args: Any) -> Range:
    numbers = [each for each in args if isinstance(each, int)]
    return (0, numbers[0] - 1) if len(numbers) == 1 else (numbers[0], numbers[1] - 1)


def _same_as(position: int = 0, *others: int) -> Callable[..., Range]:
    def rule(ranges: Ranges, node: fx.Node, *args: Any) -> Range:
        return _union(*(ranges[args[each]] for each in (position, *others)))

    return rule


def _fixed(low: float, high: float) -> Callable[..., Range]:
    return lambda *_: (low, high)


_RULES: dict[Any, Callable[..., Range]] = {
    **dict.fromkeys(
        (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.permute, aten.transpose, aten.t,
         aten.expand, aten.clone, aten.alias, aten.detach, aten.slice, aten.select, aten.repeat, aten.flip, aten.roll,
         aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.embedding, aten.amax, aten.amin,
         aten.unfold, aten.diagonal, aten.lift_fresh_copy), _same_as(0)),
    **dict.fromkeys((aten._to_copy, prims.convert_element_type), _convert),
    aten.copy: _same_as(1),
    aten.masked_fill: _same_as(0, 2),
    aten.constant_pad_nd: lambda ranges, node, value, pad, fill=0, *_: _union(ranges[value], ranges[fill]),
    aten.slice_scatter: _same_as(0, 1),
    aten.select_scatter: _same_as(0, 1),
    aten.add: _add,
    aten.sub: _sub,
    aten.mul: lambda ranges, node, left, right: _product(ranges[left], ranges[right]),
    aten.neg: _neg,
    aten.abs: _abs,
    aten.clamp: _clamp,
    aten.clamp_min: lambda ranges, node, value, least: _clamp(ranges, node, value, least),
    aten.clamp_max: lambda ranges, node, value, most: _clamp(ranges, node, value, None, most),
    aten.maximum: _largest,
    aten.minimum: _least,
    aten.remainder: _remainder,
    aten.fmod: _fmod,
    aten.div: _div,
    aten.floor_divide: _div,
    aten.where: _where,
    aten.bitwise_and: _and,
    aten.cat: _cat,
    aten.stack: _cat,
    aten.sum: _summed,
    aten.cumsum: _summed,
    aten.floor: _rounded(math.floor),
    aten.ceil: _rounded(math.ceil),
    aten.round: _rounded(round),
    aten.trunc: _rounded(math.trunc),
    aten.sqrt: _sqrt,
    aten.relu: lambda ranges, node, value: _clamp(ranges, node, value, 0),
    aten.arange: _arange,
    prims.iota: _arange,
    aten.full: _same_as(1),
    aten.full_like: _same_as(1),
    aten.new_full: _same_as(2),
    aten.scalar_tensor: _same_as(0),
    aten.fill: _same_as(1),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), _fixed(0, 0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), _fixed(1, 1)),
    **dict.fromkeys((aten.sigmoid, aten._softmax, aten.rand, aten.rand_like, aten.bernoulli), _fixed(0, 1)),
    **dict.fromkeys((aten.tanh, aten.sin, aten.cos, aten.sign), _fixed(-1, 1)),
    **dict.fromkeys((aten.argmax, aten.argmin, aten.argsort), _places),
    **dict.fromkeys((aten.bucketize, aten.searchsorted), _edges),
    aten.randint: _drawn,
    aten.randperm: _drawn,
    aten.randint_like: lambda ranges, node, like, *numbers: _drawn(ranges, node, *numbers),
    aten.multinomial: lambda ranges, node, weights, *_: (0, weights.meta["val"].shape[-1] - 1),
}  # fmt: skip
"""By op: a rule, called with the ranges, the node and its arguments."""

_PARTS: dict[tuple[Any, Any], Callable[..., Range]] = {
    **{(op, 1): _places for op in (aten.topk, aten.sort, aten.max, aten.min, aten.median, aten.mode, aten.kthvalue)},
    **{(op, 0): _same_as(0) for op in (aten.topk, aten.sort, aten.max, aten.min)},
    (torch.ops.twinstep.unique_rows, 0): _fixed(0, INF),
}
"""By op and part of its result."""

_COMPARED: dict[Any, tuple[bool, int]] = {
    aten.lt: (True, 1),
    aten.le: (True, 0),
    aten.gt: (False, 1),
    aten.ge: (False, 0),
}
"""Whether a comparison that holds bounds its first argument from above, and by how much more among integers."""
