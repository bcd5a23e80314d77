"""torch's own Transformer layers, with every kind of mask they take, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinstep

LENGTH = 5


class Layers(nn.Module):
    """An encoder, causal and padded, and a decoder that looks at it; they do not say that their masks are causal."""

    def __init__(self, masks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(20, 8, padding_idx=0)
        sizes: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(**sizes, activation="gelu", norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 1)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.items.weight
        self.masks = masks

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.items(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        window = causal.masked_fill(torch.ones(LENGTH, LENGTH).tril(-2).bool(), -torch.inf)
        padded = torch.zeros(ids.shape).masked_fill(ids == 0, -1e9)
        mask = {"causal": causal, "boolean": causal.isinf(), "window": window}[self.masks]
        padding = padded < 0 if self.masks == "boolean" else padded
        memory = self.encoder(hidden, mask=mask, src_key_padding_mask=padding)
        return self.out(self.decoder(hidden.flip(1), memory, tgt_mask=mask, memory_key_padding_mask=padding))


def step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten(), ignore_index=0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@pytest.mark.parametrize("masks", ["causal", "boolean", "window"])
def test_transformer_layers_with_masks_follow_eager(masks: str) -> None:
    model = Layers(masks)
    ids = torch.randint(1, 20, (3, 4, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 0, -2:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    detect = nn.modules.transformer._detect_is_causal_mask
    report = twinstep.parity(step, model, optimizer, list(ids), backends=["xla"], steps=3, gradients=None)
    assert report.ok, report.summary()
    assert nn.modules.transformer._detect_is_causal_mask is detect
