"""What is known of a table's quiet rows: those whose gradient is zero, since no id of the batch names them.

An optimizer's update is a chain of elementwise ops. `rule_for` says, op by op, what becomes of a quiet row: whether it
is zero, still the very row of a state tensor, positive, and so on. If a chain ends in the row it started from, only the
rows that ids name need it.

Two things are taken for granted, as they hold in a step that is not lost already: state and the numbers of the whole
step (learning rate, clip factor) are finite, and no number of the whole step that is divided by is zero. −0 counts
as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Quiet:
    """Facts about every element of a value's quiet rows; what is not known is left at its default."""

    zero: bool = False
    same: fx.Node | None = None
    """The placeholder whose row it equals, bit for bit."""
    non_negative: bool = False
    positive: bool = False
    finite: bool = False
    truth: bool | None = None
    """The value of a bool."""
    number: float | None = None
    """A number that is the same for all rows and known now."""
    whole: bool = False
    """One value for all rows, a learning rate say; not known now."""


UNKNOWN = Quiet()
WHOLE = Quiet(finite=True, whole=True)


def of_number(value: float) -> Quiet:
    """Return what is known of a number."""
    return Quiet(
        zero=value == 0,
        non_negative=value >= 0,
        positive=value > 0,
        finite=math.isfinite(value),
        truth=value if isinstance(value, bool) else None,
        number=float(value),
    )


Facts = Sequence[Quiet]
Rule = Callable[[Facts, fx.Node], Quiet]


def _sum(left: Quiet, right: Quiet) -> Quiet:
    if right.zero and not left.whole:
        return left
    if left.zero and not right.whole:
        return right
    both = left.non_negative and right.non_negative
    return Quiet(
        non_negative=both,
        positive=both and (left.positive or right.positive),
        finite=left.finite and right.finite,
    )


def _product(left: Quiet, right: Quiet) -> Quiet:
    for one, other in ((left, right), (right, left)):
        if one.zero:
            return replace(of_number(0), number=None) if other.finite else UNKNOWN
        if one.number == 1 and not other.whole:
            return other
    both = left.non_negative and right.non_negative
    return Quiet(non_negative=both, positive=left.positive and right.positive, finite=left.finite and right.finite)


def _quotient(left: Quiet, right: Quiet) -> Quiet:
    nonzero = right.positive or right.whole or (right.number is not None and right.number != 0)
    if left.zero:
        return replace(of_number(0), number=None) if nonzero else UNKNOWN
    both = left.non_negative and right.positive
    return Quiet(non_negative=both, positive=both and left.positive, finite=left.finite and nonzero)


def _scaled(value: Quiet, node: fx.Node, name: str) -> Quiet:
    factor = node.kwargs.get(name, 1)
    return _product(value, of_number(factor)) if isinstance(factor, int | float) else _product(value, WHOLE)


def _negated(value: Quiet) -> Quiet:
    return value if value.zero else Quiet(finite=value.finite)


def _add(facts: Facts, node: fx.Node) -> Quiet:
    return _sum(facts[0], _scaled(facts[1], node, "alpha"))


def _sub(facts: Facts, node: fx.Node) -> Quiet:
    return _sum(facts[0], _negated(_scaled(facts[1], node, "alpha")))


def _mul(facts: Facts, node: fx.Node) -> Quiet:
    found = _product(facts[0], facts[1])
    return replace(found, non_negative=True) if node.args[0] is node.args[1] else found


def _root(facts: Facts, _: fx.Node) -> Quiet:
    value = facts[0]
    return value if value.zero else Quiet(non_negative=True, positive=value.positive, finite=value.finite)


def _magnitude(facts: Facts, _: fx.Node) -> Quiet:
    """An absolute value or a square."""
    return _root(facts, _)


def _power(facts: Facts, node: fx.Node) -> Quiet:
    value, exponent = facts[0], facts[1].number
    if exponent is None or exponent <= 0:
        return UNKNOWN
    if exponent == 1:
        return value
    even = exponent % 2 == 0 or exponent == 0.5
    return (
        value
        if value.zero
        else Quiet(non_negative=even or value.non_negative, positive=value.positive, finite=value.finite)
    )


def _keeps_zero(facts: Facts, _: fx.Node) -> Quiet:
    return facts[0] if facts[0].zero else UNKNOWN


def _odd(facts: Facts, _: fx.Node) -> Quiet:
    return _negated(facts[0])


def _cast(facts: Facts, node: fx.Node) -> Quiet:
    source = node.args[0]
    assert isinstance(source, fx.Node)  # noqa: S101
    same_dtype = source.meta["val"].dtype == node.meta["val"].dtype
    return facts[0] if same_dtype else replace(facts[0], same=None, truth=None)


def _inverse(facts: Facts, _: fx.Node) -> Quiet:
    good = facts[0].positive
    return Quiet(non_negative=good, positive=good, finite=good)


def _where(facts: Facts, _: fx.Node) -> Quiet:
    condition, left, right = facts
    if condition.truth is not None:
        return left if condition.truth else right
    return _either(left, right)


def _either(left: Quiet, right: Quiet) -> Quiet:
    return Quiet(
        zero=left.zero and right.zero,
        same=left.same if left.same is right.same else None,
        non_negative=left.non_negative and right.non_negative,
        positive=left.positive and right.positive,
        finite=left.finite and right.finite,
        truth=left.truth if left.truth == right.truth else None,
    )


def _extreme(facts: Facts, _: fx.Node) -> Quiet:
    return _either(facts[0], facts[1])


def _clamp(facts: Facts, node: fx.Node) -> Quiet:
    low, high = _limits(node)
    if not all(each is None or isinstance(each, int | float) for each in (low, high)):
        return UNKNOWN
    if facts[0].zero:
        return facts[0] if (low is None or low <= 0) and (high is None or high >= 0) else UNKNOWN
    floor = low is not None and (high is None or high >= low)
    return Quiet(non_negative=floor and low >= 0, positive=floor and low > 0, finite=facts[0].finite)


def _limits(node: fx.Node) -> tuple[Any, Any]:
    given: Any = (*node.args[1:], *node.kwargs.values())
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet is aten.clamp_min:
        return given[0], None
    if packet is aten.clamp_max:
        return None, given[0]
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    return low, high


def _compare(holds: Callable[[float, float], bool]) -> Rule:
    def rule(facts: Facts, _: fx.Node) -> Quiet:
        left, right = (0.0 if each.zero else each.number for each in facts[:2])
        return UNKNOWN if left is None or right is None else Quiet(truth=holds(left, right))

    return rule


def _of_zero(truth: bool) -> Rule:
    return lambda facts, _: Quiet(truth=truth) if facts[0].zero else UNKNOWN


def _and(facts: Facts, _: fx.Node) -> Quiet:
    truths = [each.truth for each in facts[:2]]
    return Quiet(truth=False if False in truths else None if None in truths else True)


def _or(facts: Facts, _: fx.Node) -> Quiet:
    truths = [each.truth for each in facts[:2]]
    return Quiet(truth=True if True in truths else None if None in truths else False)


def _not(facts: Facts, _: fx.Node) -> Quiet:
    return Quiet(truth=None if facts[0].truth is None else not facts[0].truth)


def _same_value(facts: Facts, _: fx.Node) -> Quiet:
    return facts[0]


def _addcmul(facts: Facts, node: fx.Node) -> Quiet:
    return _sum(facts[0], _scaled(_product(facts[1], facts[2]), node, "value"))


def _addcdiv(facts: Facts, node: fx.Node) -> Quiet:
    return _sum(facts[0], _scaled(_quotient(facts[1], facts[2]), node, "value"))


RULES: dict[Any, Rule] = {
    aten.add: _add,
    aten.sub: _sub,
    aten.mul: _mul,
    aten.div: lambda facts, _: _quotient(facts[0], facts[1]),
    aten.addcmul: _addcmul,
    aten.addcdiv: _addcdiv,
    aten.neg: _odd,
    aten.sqrt: _root,
    aten.abs: _magnitude,
    aten.square: _magnitude,
    aten.relu: _magnitude,
    aten.pow: _power,
    aten.reciprocal: _inverse,
    aten.rsqrt: _inverse,
    aten.where: _where,
    aten.maximum: _extreme,
    aten.minimum: _extreme,
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: _clamp,
    aten._to_copy: _cast,
    prims.convert_element_type: _cast,
    aten.clone: _same_value,
    aten.alias: _same_value,
    aten.detach: _same_value,
    aten.ne: _compare(lambda left, right: left != right),
    aten.eq: _compare(lambda left, right: left == right),
    aten.gt: _compare(lambda left, right: left > right),
    aten.ge: _compare(lambda left, right: left >= right),
    aten.lt: _compare(lambda left, right: left < right),
    aten.le: _compare(lambda left, right: left <= right),
    aten.isnan: _of_zero(False),
    aten.isinf: _of_zero(False),
    aten.isfinite: _of_zero(True),
    aten.logical_and: _and,
    aten.bitwise_and: _and,
    aten.logical_or: _or,
    aten.bitwise_or: _or,
    aten.logical_not: _not,
    aten.bitwise_not: _not,
    **dict.fromkeys((aten.sign, aten.tanh, aten.sin, aten.erf, aten.expm1, aten.log1p, aten.trunc), _keeps_zero),
}
"""What elementwise ops make of quiet rows; of another elementwise op's result nothing is known."""


def rule_for(target: Any) -> Rule | None:
    """Return the rule of an elementwise op; None: it is not known to be elementwise."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    rule = RULES.get(target.overloadpacket)
    if rule is None and torch.Tag.pointwise in target.tags:
        return lambda facts, node: UNKNOWN
    return rule
