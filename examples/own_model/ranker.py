"""A ranker of one's own, trained as a job: self-attention over a user's history, scored against each candidate.

    twinstep train examples/own_model/job.yaml      # from the clone's root

Plain PyTorch, one block of SASRec (Kang & McAuley 2018, arXiv:1808.09781). `job.yaml` names `ranker:build`.

# Shapes: B rows, U history slots, K candidate slots, E embedding width, J action bits, Q tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import twinstep


class Ranker(nn.Module):
    """History → one vector per user; with each candidate's, through an MLP → logits."""

    def __init__(self, config: twinstep.ModuleConfig, hidden: int) -> None:
        super().__init__()
        self.config, width = config, config.tables[0].dim
        self.tables = config.embedding_collection()
        self.position = nn.Embedding(config.uih_len, width)
        self.action = nn.Linear(config.action_bits, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        users = len(config.contextual) * width
        self.register_buffer("bits", torch.arange(config.action_bits))
        self.register_buffer("slots", torch.arange(config.uih_len))
        self.head = nn.Sequential(nn.Linear(3 * width + users, hidden), nn.ReLU(), nn.Linear(hidden, len(config.tasks)))

    def lookups(self, batch: twinstep.Batch) -> list[twinstep.Lookup]:
        """Return the rows that a batch asks for: by item feature [B * (U + K)], by user feature [B]."""
        known = torch.cat([batch.slots_valid(), batch.candidates_valid()], dim=1).flatten()
        ids = torch.cat([batch.in_slots(batch.uih_ids), batch.cand_ids], dim=2).flatten(1)
        items = [twinstep.Lookup(each.table, ids[f], known) for f, each in enumerate(self.config.item_features)]
        there = batch.num_candidates > 0
        users = enumerate(self.config.contextual)
        return items + [twinstep.Lookup(each.table, batch.contextual_ids[:, c], there) for c, each in users]

    def forward(self, batch: twinstep.Batch) -> Tensor:
        """Return logits, [Q, B, K]."""
        rows = [self.tables(each.table, each.ids, each.valid) for each in self.lookups(batch)]
        F, (B, U) = len(self.config.item_features), batch.slot_token.shape
        items_BSE = sum(rows[1:F], rows[0]).unflatten(0, (B, -1))
        events_BUE, candidates_BKE = items_BSE[:, :U], items_BSE[:, U:]
        actions_BUJ = (batch.in_slots(batch.uih_actions).unsqueeze(-1) >> self.bits) & 1
        x_BUE = events_BUE + self.position.weight + self.action(actions_BUJ.float())
        newest_BU1 = (self.slots == batch.uih_lengths.unsqueeze(1) - 1).float().unsqueeze(-1)
        user_BKE = (self.attend(x_BUE, batch.slots_valid()) * newest_BU1).sum(1, keepdim=True).expand_as(candidates_BKE)
        about_BKE = [each.unsqueeze(1).expand_as(candidates_BKE) for each in rows[F:]]
        both_BKE = torch.cat([user_BKE, candidates_BKE, user_BKE * candidates_BKE, *about_BKE], dim=-1)
        return self.head(both_BKE).permute(2, 0, 1)

    def attend(self, x_BUE: Tensor, valid_BU: Tensor) -> Tensor:
        """Return each event with what it takes from those before it, [B, U, E]."""
        query, key, value = self.qkv(self.norm(x_BUE)).chunk(3, dim=-1)
        scores_BUU = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        seen_BUU = torch.ones_like(scores_BUU, dtype=torch.bool).tril() & valid_BU.unsqueeze(1)
        return x_BUE + torch.where(seen_BUU, scores_BUU, -1e9).softmax(dim=-1) @ value


def build(config: twinstep.ModuleConfig, hidden: int = 64) -> nn.Module:
    """Return the module; `model.arguments` of the job spec are the keyword arguments."""
    return Ranker(config, hidden)
