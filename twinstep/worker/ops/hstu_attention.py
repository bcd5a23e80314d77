"""HSTU's attention: scores through SiLU, divided by the batch's N, no softmax; who sees whom is a rule on integers.

`hstu_attention` is what models call. It runs plain PyTorch, with a mask per row pair, unless the compiler captures the
step and asks for the fused operator (`fused()`): then it is one node, `twinstep::hstu_attention`, with a node
`twinstep::hstu_attention_backward` for its gradients, and each backend lowers the two its own way. On CPU tensors the
operators run the kernel of `hstu_kernel.py`, on CUDA tensors those of `hstu_triton.py`; where there is none, or the
dtype is not its, `reference`.

A row is `[prefix slots | target slots]`. Tokens fill the first slots of each part; a token's column is its place among
the row's tokens. A token sees itself and all tokens of lower rank; rank is the column, and all targets share the rank
of the first, so they do not see each other. Slots without a token neither see nor are seen: what stands in them, NaN
included, reaches nothing, and the operators give zeros there. Source of the formulas: "Actions Speak Louder than
Words", arXiv 2402.17152, and the mask of the public generative-recommenders code.

# Shapes: B rows, S slots per row, K of them target slots, P = S - K prefix slots, H heads, A query/key width,
# V value width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinstep.worker.ops import hstu_kernel

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Who sees whom, in integers that are the same for all rows."""

    num_targets: int
    """K: the last slots of each row are for targets."""
    contextual_len: int = 0
    """That many leading columns share rank 0 and see all but the targets; 0: they are plain prefix."""
    window: int = 0
    """Highest distance in rank that is seen (upstream: max_attn_len); 0: any. It does not bind contextual columns."""
    target_aware: bool = True
    """Whether targets share a rank; if not, each one sees those before it."""
    full_len: int = 0
    """Tokens of the last that many ranks before the targets' rank, and targets, see beyond the window (upstream:
    min_full_attn_seq_len); before the row's end where targets share no rank. 0: none does."""


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows that one batch's attention runs over; `attention_rows` makes it once for all layers."""

    prefix_lengths_B: Tensor
    """int64: prefix tokens of each row, at most P."""
    target_lengths_B: Tensor
    """int64: targets of each row, at most K."""
    rule: AttentionRule
    mask_BSS: Tensor | None
    """Which slot may look at which, bool (query, key); None where the fused operator runs, which needs none."""


class _Switch:
    """Whether `hstu_attention` is one operator. A plain attribute: torch.compile can guard on it."""

    fused = False
    left_out = ""


@contextlib.contextmanager
def fused(on: bool = True) -> Iterator[None]:
    """Let `hstu_attention` be the fused operator within the block, or plain PyTorch; for the compiler's capture."""
    before, _Switch.fused = _Switch.fused, on
    _Switch.left_out = ""
    try:
        yield
    finally:
        _Switch.fused = before


def left_out() -> str:
    """Return why attention was plain PyTorch within the latest `fused` block; empty where it was not."""
    return _Switch.left_out


def attention_rows(
    prefix_lengths_B: Tensor, target_lengths_B: Tensor, *, num_slots: int, rule: AttentionRule, plain: str = ""
) -> AttentionRows:
    """Return the rows to attend over.

    Args:
        num_slots: S.
        plain: what the attention will have that the fused operator has not: it is plain PyTorch then, whatever the
            compiler asks for, and the compiler says so. Empty: nothing.
    """
    if _Switch.fused and plain:
        _Switch.left_out = plain
    mask_BSS = None if _Switch.fused and not plain else slot_mask(prefix_lengths_B, target_lengths_B, num_slots, rule)
    return AttentionRows(prefix_lengths_B, target_lengths_B, rule, mask_BSS)


def hstu_attention(
    q_BSHA: Tensor,
    k_BSHA: Tensor,
    v_BSHV: Tensor,
    rows: AttentionRows,
    n: Tensor,
    *,
    alpha: float,
    bias_BSS: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return silu(alpha · q·kᵀ + bias)/n, masked, dropped, times v: [B, S, H, V], of no meaning in empty slots.

    Args:
        n: [] float32, longest row of the batch: a value of the batch, not of its padded width. No gradient reaches it.
        alpha: factor on q·k.
        bias_BSS: added to the scores of every head; rows must be `plain` for it.
        dropout: probability of zeroing a weight, the others growing to match; rows must be `plain` for it.
    """
    if rows.mask_BSS is None:
        assert bias_BSS is None, "rows for a bias are plain"  # noqa: S101
        assert dropout == 0, "rows for dropout are plain"  # noqa: S101
        rule = rows.rule
        out: Tensor = torch.ops.twinstep.hstu_attention(
            q_BSHA,
            k_BSHA,
            v_BSHV,
            rows.prefix_lengths_B,
            rows.target_lengths_B,
            n,
            rule.num_targets,
            rule.contextual_len,
            rule.window,
            rule.target_aware,
            rule.full_len,
            alpha,
        )
        return out
    return masked_attention(q_BSHA, k_BSHA, v_BSHV, rows.mask_BSS, n, alpha=alpha, bias_BSS=bias_BSS, dropout=dropout)


def masked_attention(
    q_BSHA: Tensor,
    k_BSHA: Tensor,
    v_BSHV: Tensor,
    mask_BSS: Tensor,
    n: Tensor,
    *,
    alpha: float,
    bias_BSS: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention over padded rows in plain PyTorch, [B, S, H, V]; it writes the scores, [B, H, S, S]."""
    scores_BHSS = torch.einsum("bqha,bkha->bhqk", q_BSHA, k_BSHA) * alpha
    if bias_BSS is not None:
        scores_BHSS = scores_BHSS + bias_BSS.unsqueeze(1)
    weights_BHSS = torch.where(mask_BSS.unsqueeze(1), F.silu(scores_BHSS) / n, 0.0)
    if dropout > 0:
        weights_BHSS = F.dropout(weights_BHSS, dropout, training=True)
    return torch.einsum("bhqk,bkhv->bqhv", weights_BHSS, v_BSHV)


def attention_mask(columns_BS: Tensor, valid_BS: Tensor, first_target_B: Tensor | None, rule: AttentionRule) -> Tensor:
    """Return which slot may look at which, [B, S, S] bool (query, key).

    Args:
        columns_BS: column of each slot in its packed row.
        valid_BS: whether the slot holds a token.
        first_target_B: column of the row's first target; None: no targets.
    """
    rank_BS = columns_BS
    last_B = first_target_B
    if rule.contextual_len > 0:
        rank_BS = (rank_BS - rule.contextual_len + 1).clamp(min=0)
        last_B = None if last_B is None else last_B - rule.contextual_len + 1
    if last_B is not None:
        rank_BS = torch.minimum(rank_BS, last_B.unsqueeze(1))
    query, key = rank_BS.unsqueeze(2), rank_BS.unsqueeze(1)
    same = columns_BS.unsqueeze(2) == columns_BS.unsqueeze(1)
    seen = query > key
    if rule.window > 0:
        near = query - key <= rule.window
        if rule.full_len > 0:
            end_B = last_B if last_B is not None else valid_BS.sum(1) - max(rule.contextual_len - 1, 0)
            near = near | (query >= end_B.view(-1, 1, 1) - rule.full_len)
        seen = seen & near
    seen = seen | same
    if rule.contextual_len > 0:
        before_targets = key < last_B.view(-1, 1, 1) if last_B is not None else key >= 0
        seen = seen | ((query == 0) & before_targets)
    return seen & valid_BS.unsqueeze(2) & valid_BS.unsqueeze(1)


def slot_valid(prefix_lengths_B: Tensor, target_lengths_B: Tensor, num_slots: int, num_targets: int) -> Tensor:
    """Return whether each slot holds a token, [B, S] bool."""
    slots = torch.arange(num_slots, device=prefix_lengths_B.device).unsqueeze(0)
    first = num_slots - num_targets
    in_prefix = slots < prefix_lengths_B.clamp(max=first).unsqueeze(1)
    return in_prefix | ((slots >= first) & (slots - first < target_lengths_B.unsqueeze(1)))


def slot_mask(prefix_lengths_B: Tensor, target_lengths_B: Tensor, num_slots: int, rule: AttentionRule) -> Tensor:
    """Return which slot may look at which, [B, S, S] bool (query, key), from lengths."""
    first = num_slots - rule.num_targets
    prefix_B = prefix_lengths_B.clamp(min=0, max=first)
    slots = torch.arange(num_slots, device=prefix_lengths_B.device).unsqueeze(0)
    columns_BS = torch.where(slots < first, slots, slots - first + prefix_B.unsqueeze(1))
    valid_BS = slot_valid(prefix_B, target_lengths_B, num_slots, rule.num_targets)
    return attention_mask(columns_BS, valid_BS, prefix_B if rule.target_aware else None, rule)


def reference(
    q_BSHA: Tensor,
    k_BSHA: Tensor,
    v_BSHV: Tensor,
    prefix_lengths_B: Tensor,
    target_lengths_B: Tensor,
    n: Tensor,
    rule: AttentionRule,
    alpha: float,
) -> Tensor:
    """Return what `twinstep::hstu_attention` is, in plain ATen; zeros in slots without a token."""
    S = q_BSHA.shape[1]
    valid_BS11 = slot_valid(prefix_lengths_B, target_lengths_B, S, rule.num_targets)[:, :, None, None]
    q, k, v = (torch.where(valid_BS11, x, 0.0) for x in (q_BSHA, k_BSHA, v_BSHV))
    mask_BSS = slot_mask(prefix_lengths_B, target_lengths_B, S, rule)
    return masked_attention(q, k, v, mask_BSS, n.to(q.dtype), alpha=alpha).contiguous()


def reference_backward(
    grad_BSHV: Tensor,
    q_BSHA: Tensor,
    k_BSHA: Tensor,
    v_BSHV: Tensor,
    prefix_lengths_B: Tensor,
    target_lengths_B: Tensor,
    n: Tensor,
    rule: AttentionRule,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in plain ATen; zeros in slots without a token."""
    S = q_BSHA.shape[1]
    valid_BS11 = slot_valid(prefix_lengths_B, target_lengths_B, S, rule.num_targets)[:, :, None, None]
    q, k, v, grad = (torch.where(valid_BS11, x, 0.0) for x in (q_BSHA, k_BSHA, v_BSHV, grad_BSHV))
    mask_B1SS = slot_mask(prefix_lengths_B, target_lengths_B, S, rule).unsqueeze(1)
    n = n.to(q.dtype)
    scores_BHSS = torch.einsum("bqha,bkha->bhqk", q, k) * alpha
    gate_BHSS = torch.sigmoid(scores_BHSS)
    weights_BHSS = torch.where(mask_B1SS, scores_BHSS * gate_BHSS / n, 0.0)
    grad_weights_BHSS = torch.einsum("bqhv,bkhv->bhqk", grad, v) / n
    slope_BHSS = gate_BHSS * (1 + scores_BHSS * (1 - gate_BHSS))
    grad_scores_BHSS = torch.where(mask_B1SS, grad_weights_BHSS * slope_BHSS, 0.0) * alpha
    return (
        torch.einsum("bhqk,bkha->bqha", grad_scores_BHSS, k).contiguous(),
        torch.einsum("bhqk,bqha->bkha", grad_scores_BHSS, q).contiguous(),
        torch.einsum("bhqk,bqhv->bkhv", weights_BHSS, grad).contiguous(),
    )


_ROWS = "Tensor prefix_lengths, Tensor target_lengths, Tensor n"
_RULE = "int num_targets, int contextual_len, int window, bool target_aware, int full_len, float alpha"
# flexible_layout: the kernel reads any strides, so that a backend need not copy a view before it.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_FORWARD, _BACKWARD = "twinstep::hstu_attention", "twinstep::hstu_attention_backward"
torch.library.define(_FORWARD, f"(Tensor q, Tensor k, Tensor v, {_ROWS}, {_RULE}) -> Tensor", tags=_TAGS)
torch.library.define(
    _BACKWARD, f"(Tensor grad, Tensor q, Tensor k, Tensor v, {_ROWS}, {_RULE}) -> (Tensor, Tensor, Tensor)", tags=_TAGS
)


def _rule(options: Sequence[Any]) -> tuple[AttentionRule, float]:
    *rule, alpha = options
    return AttentionRule(*rule), alpha


@functools.cache
def _triton() -> ModuleType | None:
    """Return `hstu_triton`, or None where Triton is not installed, which is logged once. Late: CPU builds lack it."""
    try:
        return importlib.import_module("twinstep.worker.ops.hstu_triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        LOG.warning("HSTU attention runs as plain PyTorch on this GPU, which is slower: Triton is not installed")
        return None


def _triton_kernels(q: Tensor, v: Tensor) -> ModuleType | None:
    """Return the module whose kernels take these tensors, or None: no GPU, another dtype, or no Triton."""
    if not q.is_cuda:
        return None
    found = _triton()
    return found if found is not None and found.takes(q, v) else None


@torch.library.impl(_FORWARD, "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    if kernel := hstu_kernel.runs(q, v):
        return hstu_kernel.forward(kernel, q, k, v, *rest)
    if kernels := _triton_kernels(q, v):
        out: Tensor = kernels.forward(q, k, v, *rest)
        return out
    prefix, targets, n, *options = rest
    return reference(q, k, v, prefix, targets, n, *_rule(options))


@torch.library.impl(_BACKWARD, "CompositeExplicitAutograd")
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if kernel := hstu_kernel.runs(q, v):
        return hstu_kernel.backward(kernel, grad, q, k, v, *rest)
    if kernels := _triton_kernels(q, v):
        grads: tuple[Tensor, Tensor, Tensor] = kernels.backward(grad, q, k, v, *rest)
        return grads
    prefix, targets, n, *options = rest
    return reference_backward(grad, q, k, v, prefix, targets, n, *_rule(options))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.twinstep.hstu_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*found, *(None,) * (3 + len(ctx.options)))


torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
torch.library.register_autograd(_FORWARD, _grads, setup_context=_keep)

OPERATOR, OPERATOR_BACKWARD = (
    torch.ops.twinstep.hstu_attention.default,
    torch.ops.twinstep.hstu_attention_backward.default,
)
"""What nodes of a captured graph call."""
