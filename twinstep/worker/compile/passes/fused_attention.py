"""HSTU attention as one node: asked for before the step is traced, so that the scores never enter the graph.

With the strategy on, `worker/ops/hstu_attention.py` gives one operator for the forward and one for the backward; both
traces and all passes see them whole. With it off, or where no kernel can be had, the step is traced as plain ATen.
"""

from __future__ import annotations

from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.strategies import FusedAttention


def attention_as_one_op(context: PassContext) -> bool:
    """Say whether the step is to be traced with fused attention."""
    return context.strategy(FusedAttention) is not None and context.backend == "xla"
