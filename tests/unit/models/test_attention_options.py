"""What a configuration may add to attention: windows, relative bias, dropout; against a dense float64 loop."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.worker.models.config import STUConfig
from twinstep.worker.models.layout import Layout
from twinstep.worker.models.relative_bias import Distances, RelativeBias
from twinstep.worker.models.stu import STULayer
from twinstep.worker.ops.hstu_attention import (
    AttentionRule,
    attention_rows,
    fused,
    hstu_attention,
    left_out,
    slot_mask,
)

TIME_ROWS, POSITION_ROWS = 6, 4
C, U, K = 1, 5, 2
S = C + U + K


def layout_of(history: list[int], candidates: list[int]) -> Layout:
    """Rows of own slots, C contextual ones first."""
    B = len(history)
    filled = torch.arange(U) < torch.tensor(history)[:, None]
    slots = torch.arange(B * U).reshape(B, U)
    token_slot = torch.where(filled, slots, B * U).flatten()
    return Layout(
        B, C, U, K, B * U, token_slot, torch.where(filled, slots, B * U), torch.tensor(history),
        torch.tensor(candidates),
    )  # fmt: skip


def bias_by_loop(layout: Layout, times_BS: Tensor, time: Tensor, position: Tensor) -> Tensor:
    found = torch.zeros(layout.num_rows, S, S, dtype=torch.float64)
    columns = layout.columns()
    for b in range(layout.num_rows):
        high = C + int(layout.uih_lengths_B[b])
        for i in range(S):
            for j in range(S):
                seconds = max(int(times_BS[b, i] - times_BS[b, j]), 0)
                bucket = min(math.isqrt(seconds // 60), TIME_ROWS - 1)
                rank = min(max(min(int(columns[b, i]), high) - min(int(columns[b, j]), high), 0), POSITION_ROWS - 1)
                found[b, i, j] = float(time[bucket]) + float(position[rank])
    return found


LENGTHS = st.lists(st.tuples(st.integers(0, U), st.integers(0, K)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_a_relative_bias_is_the_loop_over_pairs_and_so_is_attention_with_it(lengths: Any, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    layout = layout_of([u for u, _ in lengths], [k for _, k in lengths])
    B = len(lengths)
    times_BS = torch.randint(0, 3000, (B, S), generator=made)
    bias = RelativeBias(time_rows=TIME_ROWS, position_rows=POSITION_ROWS).double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter, generator=made)
    time, position = bias._time_bias_weight, bias._position_bias_weight
    assert time is not None
    assert position is not None
    found = bias(Distances.of(layout, times_BS.flatten()))
    want = bias_by_loop(layout, times_BS, time.detach(), position.detach())
    torch.testing.assert_close(found.detach(), want, rtol=0, atol=0)

    q, k, v = (torch.randn(B, S, 2, 3, generator=made, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = layout.attention_rows(plain="a relative bias")
    n = torch.tensor(7.0, dtype=torch.float64)
    out = hstu_attention(q, k, v, rows, n, alpha=0.4, bias_BSS=found)
    mask = slot_mask(layout.uih_lengths_B + C, layout.cand_lengths_B, S, AttentionRule(K))
    dense_bias = want.clone().requires_grad_()
    scores = torch.einsum("bqha,bkha->bhqk", q, k) * 0.4 + dense_bias[:, None]
    dense = torch.einsum("bhqk,bkhv->bqhv", scores * torch.sigmoid(scores) / n * mask[:, None], v)
    torch.testing.assert_close(out, dense)
    dy = torch.randn(out.shape, generator=made, dtype=torch.float64)
    ours = torch.autograd.grad(out, (q, k, v, time, position), dy, retain_graph=True)
    theirs = torch.autograd.grad(dense, (q, k, v, dense_bias), dy)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours[3].sum(), theirs[3].sum())  # each pair counts once in each table
    torch.testing.assert_close(ours[4].sum(), theirs[3].sum())


@pytest.mark.parametrize("kind", ["time", "position", "both"])
def test_a_layer_has_the_tables_it_asks_for_and_no_others(kind: Literal["time", "position", "both"]) -> None:
    layer = STULayer(
        STUConfig(dim=4, num_heads=1, linear_dim=2, attention_dim=2, relative_bias=kind),
        time_rows=TIME_ROWS,
        position_rows=POSITION_ROWS,
    )
    names = {name.rpartition(".")[2] for name, _ in layer.named_parameters() if "relative" in name}
    want = {"time": {"_time_bias_weight"}, "position": {"_position_bias_weight"}}
    assert names == want.get(kind, want["time"] | want["position"])


def test_dropped_weights_grow_to_match_and_carry_no_gradient() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, S, 2, 3, dtype=torch.float64) for _ in range(2))
    v = torch.eye(S, dtype=torch.float64).expand(2, 2, S, S).transpose(1, 2).clone().requires_grad_()
    lengths = torch.tensor([6, 3]), torch.tensor([2, 0])
    rows = attention_rows(*lengths, num_slots=S, rule=AttentionRule(K), plain="dropout")
    n = torch.tensor(5.0)
    whole = hstu_attention(q, k, v, rows, n, alpha=0.5)
    dropped = hstu_attention(q, k, v, rows, n, alpha=0.5, dropout=0.4)
    kept = dropped != 0
    # With the identity as values, outputs are the weights themselves.
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.6)
    share = float(kept.sum()) / float((whole != 0).sum())
    assert 0.4 < share < 0.8
    (grad,) = torch.autograd.grad(dropped.sum(), v)
    weights = dropped.detach().transpose(1, 2)
    torch.testing.assert_close(grad[..., 0].transpose(1, 2), weights.sum(2), rtol=1e-9, atol=1e-12)


def test_the_fused_operator_gives_way_to_plain_pytorch_and_says_why() -> None:
    lengths = torch.tensor([3]), torch.tensor([1])
    with fused():
        assert attention_rows(*lengths, num_slots=S, rule=AttentionRule(K)).mask_BSS is None
        assert left_out() == ""
        rows = attention_rows(*lengths, num_slots=S, rule=AttentionRule(K), plain="a relative bias")
        assert rows.mask_BSS is not None
    assert left_out() == "a relative bias"
    with fused():
        assert left_out() == ""


def test_attention_dropout_is_absent_in_evaluation() -> None:
    layout = layout_of([4, 2], [2, 1])
    config = STUConfig(dim=4, num_heads=2, linear_dim=2, attention_dim=2, attention_dropout=0.5)
    layer = STULayer(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2 * S, 4)
    rows = layout.attention_rows(plain=config.plain)
    n = torch.tensor(5.0)
    assert not torch.equal(layer(x, layout, rows, n), layer(x, layout, rows, n))
    layer.eval()
    assert torch.equal(layer(x, layout, rows, n), layer(x, layout, rows, n))
