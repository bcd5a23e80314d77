"""Where each packed token stands in its row, and the way between packed tokens and rows.

Linear work is done on packed tokens, attention on rows; `stu.py` crosses between the two through a Layout. It is made
once per forward from the batch's integers and holds no parameter.

Two orders of tokens: part by part, `[contextual (B*C) | history (T) | candidates (B*K)]`, where tokens share a budget;
row by row, `B * [contextual (C) | history (U) | candidates (K)]`, where each slot has a token of its own (`aligned`).
The second needs no copy between tokens and rows, and a batch that is spread over devices is cut between rows, not
through the three parts: XLA would send each device's tokens around at every change of order.

# Shapes: B rows, C contextual slots, K candidate slots, U history slots, S = C + U + K slots of a row,
# T packed history tokens, M = B*C + T + B*K packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinstep.worker.data.batch import Batch
from twinstep.worker.ops.hstu_attention import AttentionRows, AttentionRule, attention_rows


class _Permute(torch.autograd.Function):
    """Rows of `x` in another order. Source and target pair up one to one, so the gradient is a gather as well.

    Without this the gradient of a gather would be a scatter-add, which is slow and, on a GPU, of no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _take(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return _take(grads[0], inverse), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` of `x` with one row of zeros behind its last."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])), dim=0).index_select(0, index)


@dataclass(frozen=True, slots=True)
class Layout:
    """Token order of one batch."""

    num_rows: int
    num_contextual: int
    num_history: int
    """U."""
    num_candidates: int
    """K."""
    num_tokens: int
    """T."""
    token_slot_T: Tensor
    slot_token_BU: Tensor
    uih_lengths_B: Tensor
    cand_lengths_B: Tensor

    @staticmethod
    def of(batch: Batch) -> Layout:
        """Read the layout of a batch."""
        num_rows, num_history = batch.slot_token.shape
        return Layout(
            num_rows=num_rows,
            num_contextual=batch.contextual_ids.shape[1],
            num_history=num_history,
            num_candidates=batch.cand_times.shape[1],
            num_tokens=batch.token_slot.shape[0],
            token_slot_T=batch.token_slot,
            slot_token_BU=batch.slot_token,
            uih_lengths_B=batch.uih_lengths,
            cand_lengths_B=batch.num_candidates,
        )

    @property
    def aligned(self) -> bool:
        """Whether each slot has a token of its own, at its own place: then no gather is needed."""
        return self.num_tokens == self.num_rows * self.num_history

    def token_valid(self) -> Tensor:
        """[T] bool: the token fills a slot."""
        return self.token_slot_T < self.num_rows * self.num_history

    def columns(self) -> Tensor:
        """[B, S] int64: column of each slot in its row packed without gaps; of no meaning for empty slots."""
        history = self._arange(self.num_history) + self.num_contextual
        candidates = self._arange(self.num_candidates) + self.num_contextual + self.uih_lengths_B.unsqueeze(1)
        contextual = self._arange(self.num_contextual)
        rows = (self.num_rows, -1)
        return torch.cat((contextual.expand(*rows), history.expand(*rows), candidates), dim=1)

    def attention_rows(self, rule: AttentionRule | None = None, *, plain: str = "") -> AttentionRows:
        """Return the rows that attention runs over; contextual slots, which always hold a token, are prefix.

        Args:
            rule: who sees whom; None: plainly causal, targets apart.
            plain: why the fused operator cannot run, if so; see `ops/hstu_attention.py`.
        """
        return attention_rows(
            self.uih_lengths_B + self.num_contextual,
            self.cand_lengths_B,
            num_slots=self.num_contextual + self.num_history + self.num_candidates,
            rule=rule or AttentionRule(self.num_candidates),
            plain=plain,
        )

    def join(self, *parts: Tensor) -> Tensor:
        """Bring parts that are each in row order, [B * slots, …] or history's [T, …], to the order of tokens."""
        if not self.aligned:
            return torch.cat(parts, dim=0)
        rows = [part.reshape(self.num_rows, part.shape[0] // self.num_rows, *part.shape[1:]) for part in parts]
        return torch.cat(rows, dim=1).flatten(0, 1)

    def to_tokens(self, slots_BS: Tensor) -> Tensor:
        """Bring one integer per slot, [B, S], to the packed tokens, [M]; dummies get 0, or their slot's if aligned."""
        if self.aligned:
            return slots_BS.reshape(-1)
        C, U = self.num_contextual, self.num_history
        history = slots_BS[:, C : C + U].reshape(-1)
        history = torch.cat((history, history.new_zeros(1))).index_select(0, self.token_slot_T)
        return torch.cat((slots_BS[:, :C].reshape(-1), history, slots_BS[:, C + U :].reshape(-1)))

    def unpack(self, x_ME: Tensor) -> Tensor:
        """[M, E] packed tokens → [B, S, E] rows. Empty slots hold zeros, or values a mask must hide if aligned."""
        B, C, K, T = self.num_rows, self.num_contextual, self.num_candidates, self.num_tokens
        if self.aligned:
            return x_ME.reshape(B, C + self.num_history + K, x_ME.shape[1])
        contextual, history, candidates = torch.split(x_ME, [B * C, T, B * K])
        history = _Permute.apply(history, self.slot_token_BU.reshape(-1), self.token_slot_T)  # type: ignore[no-untyped-call]
        parts = ((contextual, C), (history, self.num_history), (candidates, K))
        # The width is written out: it cannot be told from the size of a part without slots.
        return torch.cat([part.reshape(B, slots, x_ME.shape[1]) for part, slots in parts], dim=1)

    def pack(self, x_BSE: Tensor) -> Tensor:
        """[B, S, E] rows → [M, E] packed tokens; dummies get zeros, or what stands in an empty slot if aligned."""
        if self.aligned:
            return x_BSE.reshape(x_BSE.shape[0] * x_BSE.shape[1], x_BSE.shape[2])
        C, U = self.num_contextual, self.num_history
        contextual, history, candidates = (
            part.reshape(part.shape[0] * part.shape[1], x_BSE.shape[2])
            for part in torch.split(x_BSE, [C, U, self.num_candidates], dim=1)
        )
        history = _Permute.apply(history, self.token_slot_T, self.slot_token_BU.reshape(-1))  # type: ignore[no-untyped-call]
        return torch.cat((contextual, history, candidates), dim=0)

    def candidates(self, x_XE: Tensor) -> Tensor:
        """Return the candidates' part of packed tokens, with or without contextual ones among them, [B*K, E]."""
        B, K = self.num_rows, self.num_candidates
        if not self.aligned:
            return x_XE[x_XE.shape[0] - B * K :]
        rows = x_XE.reshape(B, x_XE.shape[0] // B, *x_XE.shape[1:])
        return rows[:, rows.shape[1] - K :].flatten(0, 1)

    def _arange(self, size: int) -> Tensor:
        return torch.arange(size, device=self.uih_lengths_B.device).unsqueeze(0)
