"""The CPU kernel of HSTU attention, called with torch tensors: `hstu_kernel.cpp`, built per pair of head widths.

No scores are written to memory, blocks that nobody sees are skipped, and the backward computes the scores again. A
(row, head) pair is computed by one thread, so results are the same bits for any number of threads. Sums are float32;
numbers may be float32 or bfloat16.

# Shapes: B rows, S slots per row, H heads, A query/key width, V value width.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinstep.worker.ops import native

LOG = logging.getLogger(__name__)

SOURCE, HEADER = Path(__file__).with_suffix(".cpp"), Path(__file__).with_suffix(".h")
DTYPES = (torch.float32, torch.bfloat16)
MAX_WIDTH = 512  # of a head; a wider one would be unrolled into a very large program
_BUILDING = threading.Lock()


class View(ctypes.Structure):
    """`View` of hstu_kernel.h."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


VIEWS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` of hstu_kernel.h."""

    _fields_ = (
        *((name, View) for name in VIEWS),
        ("prefix", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("n", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("num_targets", ctypes.c_int64),
        ("contextual_len", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("target_aware", ctypes.c_int32),
        ("full_len", ctypes.c_int32),
        ("lengths64", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("alpha", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """The loaded library for one pair of head widths."""

    library: ctypes.CDLL
    """Has `hstu_forward`, `hstu_backward` (args, threads) and, for one task, `hstu_forward_pair`, `hstu_backward_pair`
    (args, index)."""


def kernel(width_qk: int, width_v: int) -> Kernel | None:
    """Return the kernel for head widths A and V; None where it cannot be built, which is logged once."""
    if not (0 < width_qk <= MAX_WIDTH and 0 < width_v <= MAX_WIDTH):
        return None
    with _BUILDING:
        return _kernel(width_qk, width_v)


@functools.cache
def _kernel(width_qk: int, width_v: int) -> Kernel | None:
    flags = (f"-DHEAD_A={width_qk}", f"-DHEAD_V={width_v}")
    try:
        return Kernel(native.load(native.build(SOURCE, flags=flags, reads=(HEADER,))))
    except native.BuildError as error:
        LOG.warning("HSTU attention runs as plain PyTorch, which is slower: %s", error)
        return None


def runs(q: Tensor, v: Tensor) -> Kernel | None:
    """Return the kernel that takes these tensors, or None: another device or dtype, or none can be built."""
    if q.device.type != "cpu" or q.dtype not in DTYPES or v.dtype != q.dtype:
        return None
    return kernel(q.shape[3], v.shape[3])


def forward(found: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Return the attention's output, contiguous; `rest` as the operator takes it."""
    out = torch.empty(v.shape, dtype=v.dtype)
    args, kept = _arguments({"q": q, "k": k, "v": v, "out": out}, *rest)
    found.library.hstu_forward(ctypes.byref(args), torch.get_num_threads())
    del kept
    return out


def backward(found: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    views = {"grad": grad.to(v.dtype), "q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
    args, kept = _arguments(views, *rest)
    found.library.hstu_backward(ctypes.byref(args), torch.get_num_threads())
    del kept
    return dq, dk, dv


def _arguments(
    views: dict[str, Tensor],
    prefix: Tensor,
    targets: Tensor,
    n: Tensor,
    num_targets: int,
    contextual_len: int,
    window: int,
    target_aware: bool,
    full_len: int,
    alpha: float,
) -> tuple[AttentionArgs, tuple[Tensor, ...]]:
    """Return the arguments, and tensors that must outlive the call."""
    prefix, targets = (x.to(torch.int64).contiguous() for x in (prefix, targets))
    n = n.to(torch.float32)
    q = views["q"]
    args = AttentionArgs(
        prefix=prefix.data_ptr(),
        targets=targets.data_ptr(),
        n=n.data_ptr(),
        rows=q.shape[0],
        slots=q.shape[1],
        heads=q.shape[2],
        num_targets=num_targets,
        contextual_len=contextual_len,
        window=window,
        target_aware=target_aware,
        full_len=full_len,
        lengths64=1,
        bfloat16=q.dtype is torch.bfloat16,
        alpha=alpha,
        **{name: View(x.data_ptr(), (ctypes.c_int64 * 4)(*x.stride())) for name, x in views.items()},
    )
    return args, (prefix, targets, n, *views.values())
