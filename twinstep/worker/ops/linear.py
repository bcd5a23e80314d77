"""`twinstep::linear`: x @ w (+ bias) through oneDNN, for processors on which it beats the BLAS that torch calls.

torch's products of float32 matrices go to MKL, which takes its widest instructions on Intel's processors alone; oneDNN
takes them wherever they are. The compiler puts the operator in place of products; it has no gradient of its own.

# Shapes: M rows, K summed width, N columns.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

_NAME = "twinstep::linear"
torch.library.define(
    _NAME, "(Tensor x, Tensor w, Tensor? bias) -> Tensor", tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu" or x.dtype is not torch.float32 or not _has_onednn():
        return x @ w if bias is None else torch.addmm(bias, x, w)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w.t(), bias, "none", [], "")
    return out


def _fake(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


torch.library.register_fake(_NAME, _fake)
LINEAR = torch.ops.twinstep.linear.default
"""`(x [M, K], w [K, N], bias [N] or None) → [M, N]`."""


@functools.cache
def beats_blas() -> bool:
    """Say whether oneDNN is the faster one here: torch has both, and the processor is not Intel's."""
    has_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return _has_onednn() and has_mkl and _vendor() not in ("", "GenuineIntel")


def _has_onednn() -> bool:
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
