"""`twinstep::barrier`: its inputs as they are, through which no compiler may see.

A value that the backward pass computes again is, to a compiler, a common subexpression of the forward pass: XLA would
compute it once and keep it, and undo the saving. Behind a barrier that also waits for a gradient it can neither be
merged nor start early (as `jax.checkpoint` does with `jax.lax.optimization_barrier`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("twinstep", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("barrier(Tensor[] values) -> Tensor[]")  # type: ignore[no-untyped-call]


def _barrier(values: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


_LIBRARY.impl("barrier", _barrier, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
BARRIER = torch.ops.twinstep.barrier.default
