"""Find what brings a divergence: rerun the steps up to it with one thing at a time switched off.

First the transformed graph itself, op by op in PyTorch: if it diverges, a pass is at fault, and the one without which
it does not is named; that takes a capture each and no compile. Otherwise the graph is right and its lowering is not:
the strategies that have a lowering of their own are left out one by one, then the writing in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.parity.result import Culprit
from twinstep.worker.compile.parity.steppers import CompiledStepper, GraphStepper, Make, Pair
from twinstep.worker.compile.parity.trial import Eager, Ledger, Settings
from twinstep.worker.compile.passes import table
from twinstep.worker.compile.passes.table import Pass
from twinstep.worker.compile.state import Optimizers


def find_culprit(settings: Settings, model: nn.Module, optimizer: Optimizers, backend: str) -> Culprit:
    """Return what a divergence within `settings.steps` goes away without.

    A pass that capture cannot do without (a lowering needs it) is tried, fails and is passed over.
    """
    tried: list[str] = []

    def cured(what: str, make: Callable[..., Any], **options: Any) -> bool:
        tried.append(what)
        options = {"backend": backend, "strategies": settings.strategies, **options}
        try:
            return not diverges(settings, model, optimizer, backend, partial(make, **options))
        except CompileError:
            return False

    if not cured("lowering", GraphStepper):
        for each in _running(settings, backend):
            if cured(f"pass {each.name}", GraphStepper, without=frozenset({each.name})):
                return Culprit(kind="pass", name=each.name, strategy=each.strategy or "", tried=tuple(tried))
        return Culprit(kind="capture", name="capture", tried=tuple(tried))
    for strategy in settings.strategies:
        rest = [each for each in settings.strategies if each is not strategy]
        if cured(f"strategy {strategy.name}", CompiledStepper, strategies=rest):
            return Culprit(kind="strategy", name=strategy.name, tried=tuple(tried))
    if cured("in-place state", CompiledStepper, in_place=False):
        return Culprit(kind="in-place state", name=backend, tried=tuple(tried))
    return Culprit(kind="lowering", name=backend, tried=tuple(tried))


def diverges(settings: Settings, model: nn.Module, optimizer: Optimizers, backend: str, make: Make) -> bool:
    """Say whether a candidate leaves its tolerance within `settings.steps`."""
    eager, side = Eager(settings, model, optimizer), Pair(settings, backend, model, optimizer, make)
    ledger = Ledger(settings, backend)
    for step in range(settings.steps):
        ledger.add(side.advance(step), eager.advance(step), eager.noise)
        if ledger.diverged:
            return True
    return False


def _running(settings: Settings, backend: str) -> list[Pass]:
    """Return the passes that run, the last first: a later one can rest on an earlier, seldom the other way round."""
    asked = {each.name for each in settings.strategies}
    rows = (*table.FIRST_TRACE_PASSES, *table.PASSES)
    return [
        each
        for each in reversed(rows)
        if backend in each.backends and (each.strategy is None or each.strategy in asked)
    ]
