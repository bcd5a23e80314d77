"""The one batch a step takes: token-packed histories, candidate slots, labels; fixed shapes whatever the rows hold.

`loader.py` fills it, `models/` reads it, the compiler treats it as a pytree. Nothing here reads data.

# Shapes: B rows, C contextual features, F item features, K candidate slots, Q tasks, U history slots per row,
# T packed history tokens = B * uih_budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from twinstep.spec.job import DataSpec
from twinstep.worker.data.events import DataSchema


class Batch(NamedTuple):
    """B rows. Integers are int64 on the host and fit int32; floats are float32.

    History tokens are packed: the budget T is shared by all rows, and each token says which slot of which row it
    fills. A token that fills none is a dummy: it is never read, and its lookups are masked to zero. If T = B * U,
    every slot has its own token (`token_slot[t]` is t or a dummy), so that a model may reshape instead of gather.
    A row without candidates is a dummy row.
    """

    uih_ids: Tensor
    """[F, T] int64: row of each item feature's table; 0 for dummies."""
    uih_times: Tensor
    """[T] int64: seconds; 0 for dummies."""
    uih_actions: Tensor
    """[T] int64: action bits; 0 for dummies."""
    token_slot: Tensor
    """[T] int64: slot b * U + j that the token fills, oldest first from j = 0; B * U for dummies."""
    slot_token: Tensor
    """[B, U] int64: token in the slot; T for an empty slot."""
    uih_lengths: Tensor
    """[B] int64: history events of the row."""
    contextual_ids: Tensor
    """[B, C] int64: row of each contextual feature's table; 0 in dummy rows."""
    cand_ids: Tensor
    """[F, B, K] int64: row of each item feature's table; 0 for empty slots."""
    cand_times: Tensor
    """[B, K] int64: seconds; 0 for empty slots."""
    num_candidates: Tensor
    """[B] int64: candidates of the row, in its first slots."""
    query_times: Tensor
    """[B] int64: seconds at which the row is scored: time of its first candidate, else of its last event, else 0."""
    labels: Tensor
    """[Q, B, K] float32."""
    weights: Tensor
    """[Q, B, K] float32; 0 for empty slots."""
    n: Tensor
    """[] float32: C + most history events of a real row + most candidates of a row; attention divides by it."""

    def in_slots(self, tokens: Tensor) -> Tensor:
        """Return integers of history tokens, [..., T] int64, by slot, [..., B, U]; 0 in empty slots."""
        if tokens.shape[-1] == self.slot_token.numel():  # each slot has a token of its own, at its own place
            slots = tokens.reshape(*tokens.shape[:-1], *self.slot_token.shape)
        else:
            padded = torch.cat((tokens, torch.zeros_like(tokens[..., :1])), dim=-1)
            slots = padded.index_select(-1, self.slot_token.reshape(-1)).reshape(
                *tokens.shape[:-1], *self.slot_token.shape
            )
        return torch.where(self.slots_valid(), slots, 0)

    def slots_valid(self) -> Tensor:
        """[B, U] bool: the slot holds an event."""
        return self.slot_token < self.token_slot.shape[0]

    def candidates_valid(self) -> Tensor:
        """[B, K] bool: the slot holds a candidate."""
        slots = torch.arange(self.cand_times.shape[1], device=self.num_candidates.device)
        return slots.unsqueeze(0) < self.num_candidates.unsqueeze(1)


def meta_batch(schema: DataSchema, spec: DataSpec) -> Batch:
    """Return a batch of the shapes and dtypes that a loader gives, on the meta device: it holds no values."""
    B, U, K, T = spec.batch_size, spec.uih_len, spec.num_candidates, spec.uih_tokens
    C, F, Q = len(schema.contextual), len(schema.item_features), len(schema.tasks)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    return Batch(
        uih_ids=integers(F, T),
        uih_times=integers(T),
        uih_actions=integers(T),
        token_slot=integers(T),
        slot_token=integers(B, U),
        uih_lengths=integers(B),
        contextual_ids=integers(B, C),
        cand_ids=integers(F, B, K),
        cand_times=integers(B, K),
        num_candidates=integers(B),
        query_times=integers(B),
        labels=floats(Q, B, K),
        weights=floats(Q, B, K),
        n=floats(),
    )


BATCH_DIMS: dict[str, int] = {
    "uih_ids": 1,
    "uih_times": 0,
    "uih_actions": 0,
    "token_slot": 0,
    "slot_token": 0,
    "uih_lengths": 0,
    "contextual_ids": 0,
    "cand_ids": 1,
    "cand_times": 0,
    "num_candidates": 0,
    "query_times": 0,
    "labels": 1,
    "weights": 1,
}
"""Position of the dimension that grows with B, by field; the packed tokens' is B * uih_budget long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStats:
    """Counts of one batch, on the host."""

    rows: int
    """Real rows."""
    real_tokens: int
    """History tokens that fill a slot."""
    dummy_tokens: int
    """History tokens that fill none."""
    events_cut: int
    """History events left out because the batch was over its budget."""
    examples: int
    """Candidates with weight > 0."""
    padded_candidates: int
    """Candidate slots without a candidate."""
    pack_s: float = field(default=0.0, compare=False)
    """Seconds it took to pack the batch."""
