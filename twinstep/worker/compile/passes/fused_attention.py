"""HSTU attention as one node: asked for before the step is traced, so that the scores never enter the graph.

With the strategy on, `worker/ops/hstu_attention.py` gives one operator for the forward and one for the backward; both
traces and all passes see them whole. With it off, or where no kernel can be had, the step is traced as plain ATen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import Tensor, fx

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.strategies import FusedAttention
from twinstep.worker.ops.hstu_attention import OPERATOR, OPERATOR_BACKWARD, left_out
from twinstep.worker.ops.native import find_compiler

NAME = FusedAttention.name
OPERATORS = {OPERATOR: 0, OPERATOR_BACKWARD: 1}
"""The operators, and which of their arguments is q."""


def attention_as_one_op(context: PassContext, example: Sequence[Tensor]) -> bool:
    """Say whether the step is to be traced with fused attention; why not goes into the notes.

    Args:
        example: the step's inputs: where they are is where Inductor's program runs.
    """
    if context.strategy(FusedAttention) is None:
        return False
    if context.backend == "inductor":
        lacks = _lacks({tensor.device.type for tensor in example if tensor.dim()})  # counts and rates are the host's
        if lacks:
            context.notes[NAME] = f"plain: {lacks}"
            return False
    return True


def _lacks(devices: set[str]) -> str:
    """Say what keeps Inductor's program from a kernel on these devices; empty: nothing."""
    if devices == {"cuda"}:
        return (
            "" if importlib.util.find_spec("triton") is not None else "the kernel needs Triton, which is not installed"
        )
    if devices - {"cpu"}:
        return f"there is no kernel for {', '.join(sorted(devices - {'cpu'}))}"
    return "" if find_compiler() is not None else "the kernel needs a C++ compiler, and none is on PATH"


def note_attention(graph: fx.GraphModule, context: PassContext) -> int:
    """Count the operators' nodes, and note the bytes of scores, [B, H, S, S] each, that are not written for them."""
    saved = []
    for node in graph.graph.nodes:
        if node.target in OPERATORS:
            q = node.args[OPERATORS[node.target]].meta["val"]
            B, S, H, _ = q.shape
            saved.append(B * H * S * S * q.element_size())
    if saved:
        context.notes[NAME] = {"nodes": len(saved), "score_bytes": sum(saved)}
    elif left_out() and NAME not in context.notes:
        context.notes[NAME] = f"plain: no kernel has {left_out()}"
    return len(saved)
