"""HSTU's attention: scores through SiLU, divided by the batch's N, no softmax; and the mask that says who sees whom.

Pure functions on rows (slots), called by `stu.py`. Zeroing is by selection, never by multiplication.

# Shapes: B rows, S slots per row, H heads, A query/key width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_mask(
    columns_BS: Tensor,
    valid_BS: Tensor,
    first_target_B: Tensor | None,
    *,
    contextual_len: int = 0,
    window: int = 0,
) -> Tensor:
    """Return which slot may look at which, [B, S, S] bool (query, key).

    A slot sees itself and all slots of lower rank; rank is the packed column, and all targets share the rank of the
    first, so they do not see each other.

    Args:
        columns_BS: column of each slot in its packed row.
        valid_BS: whether the slot holds a token; others neither see nor are seen.
        first_target_B: column of the row's first target; None: no targets.
        contextual_len: that many leading columns share rank 0 and see all but the targets; 0: they are plain prefix.
        window: highest distance in rank that is seen; 0: any. It does not bind contextual columns.
    """
    rank_BS = columns_BS
    last_B = first_target_B
    if contextual_len > 0:
        rank_BS = (rank_BS - contextual_len + 1).clamp(min=0)
        last_B = None if last_B is None else last_B - contextual_len + 1
    if last_B is not None:
        rank_BS = torch.minimum(rank_BS, last_B.unsqueeze(1))
    query, key = rank_BS.unsqueeze(2), rank_BS.unsqueeze(1)
    same = columns_BS.unsqueeze(2) == columns_BS.unsqueeze(1)
    seen = query > key
    if window > 0:
        seen = seen & (query - key <= window)
    seen = seen | same
    if contextual_len > 0:
        before_targets = key < last_B.view(-1, 1, 1) if last_B is not None else key >= 0
        seen = seen | ((query == 0) & before_targets)
    return seen & valid_BS.unsqueeze(2) & valid_BS.unsqueeze(1)


def hstu_attention(
    q_BSHA: Tensor, k_BSHA: Tensor, v_BSHV: Tensor, mask_BSS: Tensor, n: Tensor, *, alpha: float
) -> Tensor:
    """Return silu(alpha · q·kᵀ)/n, masked, times v: [B, S, H, V].

    Args:
        n: [] float32, longest row of the batch: a value of the batch, not of its padded width.
    """
    scores_BHSS = torch.einsum("bqha,bkha->bhqk", q_BSHA, k_BSHA) * alpha
    weights_BHSS = torch.where(mask_BSS.unsqueeze(1), F.silu(scores_BHSS) / n, 0.0)
    return torch.einsum("bhqk,bkhv->bqhv", weights_BHSS, v_BSHV)
