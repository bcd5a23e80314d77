"""STU layers: gated attention with a pointwise output, on packed tokens; attention alone crosses to rows.

`dlrmv3.py` stacks them. Source of the formulas: "Actions Speak Louder than Words", arXiv 2402.17152, and the layer
that the public generative-recommenders code trains; `models/__init__.py` says where we leave it.

# Shapes: B rows, S slots, M packed tokens, D token width, H heads, V value width, A query/key width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.worker.models.config import STUConfig
from twinstep.worker.models.layers import dropout
from twinstep.worker.models.layout import Layout
from twinstep.worker.models.relative_bias import Distances, RelativeBias
from twinstep.worker.ops.hstu_attention import AttentionRows, hstu_attention

NORM_EPS = 1e-6


class STULayer(nn.Module):
    """One layer; output x + Dropout([u, a, u ⊙ LN(a)]) @ W with a the attention's output."""

    def __init__(self, config: STUConfig, *, time_rows: int = 0, position_rows: int = 0) -> None:
        """Make a layer; the rows are those of its relative bias's tables, if it has one."""
        super().__init__()
        self._config = config
        H, V, A, D = config.num_heads, config.linear_dim, config.attention_dim, config.dim
        norm_dim = H if config.group_norm else H * V
        self._uvqk_weight = nn.Parameter(torch.empty(D, 2 * H * (V + A)))
        self._uvqk_beta = nn.Parameter(torch.zeros(2 * H * (V + A)))
        self._input_norm_weight = nn.Parameter(torch.ones(D))
        self._input_norm_bias = nn.Parameter(torch.zeros(D))
        self._output_weight = nn.Parameter(torch.empty(3 * H * V, D))
        self._output_norm_weight = nn.Parameter(torch.ones(norm_dim))
        self._output_norm_bias = nn.Parameter(torch.zeros(norm_dim))
        self._relative_bias = None
        if config.relative_bias != "none":
            self._relative_bias = RelativeBias(
                time_rows=time_rows if config.relative_bias in ("time", "both") else None,
                position_rows=position_rows if config.relative_bias in ("position", "both") else None,
            )
        self._alpha = A**-0.5 if config.alpha is None else config.alpha

    def forward(
        self, x_MD: Tensor, layout: Layout, rows: AttentionRows, n: Tensor, distances: Distances | None = None
    ) -> Tensor:
        """[M, D] → [M, D]; a layer with a relative bias needs `distances`."""
        config = self._config
        bias_BSS = None
        if self._relative_bias is not None:
            assert distances is not None  # noqa: S101
            bias_BSS = self._relative_bias(distances)
        H, V, A = config.num_heads, config.linear_dim, config.attention_dim
        normed_MD = F.layer_norm(x_MD, (config.dim,), self._input_norm_weight, self._input_norm_bias, NORM_EPS)
        uvqk_ME = normed_MD @ self._uvqk_weight + self._uvqk_beta
        parts = torch.split(uvqk_ME, [H * V, H * V, H * A, H * A], dim=1)
        u_ME = F.silu(parts[0])
        v_BSE, q_BSE, k_BSE = (layout.unpack(part_ME) for part_ME in parts[1:])
        heads = (*v_BSE.shape[:2], H, -1)
        a_BSHV = hstu_attention(
            q_BSE.reshape(heads),
            k_BSE.reshape(heads),
            v_BSE.reshape(heads),
            rows,
            n,
            alpha=self._alpha,
            bias_BSS=bias_BSS,
            dropout=config.attention_dropout if self.training else 0.0,
        )
        a_ME = layout.pack(a_BSHV.reshape(*v_BSE.shape[:2], H * V))
        mixed = torch.cat((u_ME, a_ME, u_ME * self._output_norm(a_ME)), dim=1)
        return x_MD + dropout(mixed, config.dropout, self.training) @ self._output_weight

    def _output_norm(self, a_ME: Tensor) -> Tensor:
        config = self._config
        H, V = config.num_heads, config.linear_dim
        if not config.group_norm:
            return F.layer_norm(a_ME, (H * V,), self._output_norm_weight, self._output_norm_bias, NORM_EPS)
        heads_MHV = F.layer_norm(a_ME.reshape(-1, H, V), (V,), eps=NORM_EPS)
        scaled = heads_MHV * self._output_norm_weight.unsqueeze(1) + self._output_norm_bias.unsqueeze(1)
        return scaled.reshape(-1, H * V)


class STUStack(nn.Module):
    """Layers one after the other."""

    def __init__(self, config: STUConfig, num_layers: int, *, time_rows: int = 0, position_rows: int = 0) -> None:
        super().__init__()
        self._stu_layers = nn.ModuleList(
            STULayer(config, time_rows=time_rows, position_rows=position_rows) for _ in range(num_layers)
        )

    def forward(
        self, x_MD: Tensor, layout: Layout, rows: AttentionRows, n: Tensor, distances: Distances | None = None
    ) -> Tensor:
        """[M, D] → [M, D]."""
        for layer in self._stu_layers:
            x_MD = layer(x_MD, layout, rows, n, distances)
        return x_MD
