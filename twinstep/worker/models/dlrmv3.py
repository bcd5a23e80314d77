"""DLRMv3: embeddings → preprocessor → position and time → STU layers → heads, over one token-packed batch.

`registry.py` builds it from a spec. Every shape is static; what varies between batches (lengths, N) is a tensor's
value. Parameter names are those of the public model, so that its weights can be loaded.

# Shapes: B rows, C contextual slots, F item features, K candidate slots, S slots of a row, T history tokens,
# N = T + B*K, M = B*C + N, E table width, D token width, Q tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.worker.data.batch import Batch
from twinstep.worker.embedding.collection import EmbeddingCollection, Lookup
from twinstep.worker.models.config import DLRMv3Config
from twinstep.worker.models.heads import ModelOutput, MultitaskModule
from twinstep.worker.models.layers import dropout, mlp
from twinstep.worker.models.layout import Layout
from twinstep.worker.models.positional import HSTUPositionalEncoder, positions
from twinstep.worker.models.postprocessor import POSTPROCESSORS
from twinstep.worker.models.preprocessor import ContextualPreprocessor
from twinstep.worker.models.public_weights import load_public, public_state
from twinstep.worker.models.relative_bias import Distances
from twinstep.worker.models.stu import STUStack
from twinstep.worker.ops.hstu_attention import AttentionRule


class HSTUTransducer(nn.Module):
    """From embeddings to one vector per candidate."""

    def __init__(self, config: DLRMv3Config) -> None:
        super().__init__()
        dim = config.layer.dim
        self._input_dropout = config.input_dropout
        self._input_preprocessor = ContextualPreprocessor(
            embedding_dim=config.tables[0].dim,
            dim=dim,
            hidden_dim=config.hidden_dim,
            num_contextual=len(config.contextual),
            num_additional=len(config.item_features) - 1,
            action_masks=config.action_masks,
            action_dim=config.action_dim,
        )
        self._positional_encoder = HSTUPositionalEncoder(
            dim, position_rows=config.position_rows, time_rows=config.time_rows
        )
        self._layer = config.layer
        self._stu_module = STUStack(
            config.layer, config.num_layers, time_rows=config.time_rows, position_rows=config.position_rows
        )
        self._output_postprocessor = POSTPROCESSORS[config.postprocessor](dim)

    def forward(self, batch: Batch, layout: Layout, items_FNE: list[Tensor], contextual_BCE: Tensor | None) -> Tensor:
        """Return the candidates' vectors, [B*K, D]."""
        additional = torch.cat(items_FNE[1:], dim=1) if len(items_FNE) > 1 else None
        x_MD = self._input_preprocessor.tokens(items_FNE[0], additional, batch.uih_actions, layout.join)
        contextual_times = batch.uih_times.new_zeros(layout.num_rows * layout.num_contextual)
        if contextual_BCE is not None:
            x_MD = layout.join(self._input_preprocessor.contextual(contextual_BCE).flatten(0, 1), x_MD)
        columns_BS = layout.columns()
        high_B1 = (layout.uih_lengths_B + layout.num_contextual).unsqueeze(1)
        position_M = layout.to_tokens(positions(columns_BS, high_B1, layout.num_contextual))
        query_M = layout.to_tokens(batch.query_times.unsqueeze(1).expand_as(columns_BS))
        times_M = layout.join(contextual_times, batch.uih_times, batch.cand_times.reshape(-1))
        x_MD = self._positional_encoder(x_MD, position_M, query_M - times_M)
        x_MD = dropout(x_MD, self._input_dropout, self.training)
        layer = self._layer
        rule = AttentionRule(layout.num_candidates, window=layer.max_attn_len, full_len=layer.full_attn_len)
        rows = layout.attention_rows(rule, plain=layer.plain)
        # All candidates are asked for at the query's moment: what each one's own time is, nobody knows then.
        asked_M = torch.minimum(times_M, query_M)
        distances = Distances.of(layout, asked_M) if layer.relative_bias != "none" else None
        x_MD = self._stu_module(x_MD, layout, rows, batch.n, distances)
        out: Tensor = self._output_postprocessor(layout.candidates(x_MD), batch.cand_times.reshape(-1))
        return out


class DLRMv3(nn.Module):
    """The whole model; `model(batch)` gives a ModelOutput."""

    def __init__(self, config: DLRMv3Config, *, declared: bool = False) -> None:
        super().__init__()
        self.config = config
        dims = {table.dim for table in config.tables}
        assert len(dims) == 1, "contextual slots share one batched map, so tables share a width"  # noqa: S101
        self._embedding_collection = EmbeddingCollection(
            {t.name: (t.rows, t.dim) for t in config.tables}, declared=declared
        )
        self._hstu_transducer = HSTUTransducer(config)
        self._item_embedding_mlp = mlp(
            config.tables[0].dim * len(config.item_features), config.head_hidden_dim, config.layer.dim
        )
        self._multitask_module = MultitaskModule(
            config.tasks, dim=config.layer.dim, hidden_dim=config.head_hidden_dim, loss_weight=config.loss_weight
        )

    @classmethod
    def from_generative_recommenders(cls, state_dict: Mapping[str, Any], config: DLRMv3Config) -> DLRMv3:
        """Return a model with the weights of the public generative-recommenders `DlrmHSTU`.

        Args:
            state_dict: `model.state_dict()` of the public model, on any device; its tables may be float16.
            config: the configuration that it was made with; `position_rows` and `time_rows` are 8192 and 2049 there.

        Raises:
            TrainError: keys are unknown, missing, of another shape or dtype, or action masks differ; all are named.
        """
        model = cls(config)
        load_public(model, state_dict)
        return model

    def to_generative_recommenders(self) -> dict[str, Tensor]:
        """Return copies of the weights as the public `DlrmHSTU.load_state_dict` takes them, buffers included."""
        return public_state(self)

    def forward(self, batch: Batch) -> ModelOutput:
        """Score and grade every candidate of the batch."""
        layout = Layout.of(batch)
        items_FNE = self._look_up(self._item_lookups(batch, layout))
        slots_CBE = self._look_up(self._contextual_lookups(batch, layout))
        contextual_BCE = torch.stack(slots_CBE, dim=1) if slots_CBE else None
        user_RD = self._hstu_transducer(batch, layout, items_FNE, contextual_BCE)
        item_RD = self._item_embedding_mlp(torch.cat([layout.candidates(x_NE) for x_NE in items_FNE], dim=1))
        logits_QR = self._multitask_module(user_RD, item_RD)
        losses_Q = self._multitask_module.losses(logits_QR, batch.labels.flatten(1), batch.weights.flatten(1))
        return ModelOutput(
            loss=losses_Q.sum(),
            task_losses=losses_Q,
            logits=logits_QR.reshape(batch.labels.shape).to(torch.float32),
        )

    def lookups(self, batch: Batch) -> list[Lookup]:
        """Return what the forward asks the collection for, in that order: item features, then contextual ones."""
        layout = Layout.of(batch)
        return [*self._item_lookups(batch, layout), *self._contextual_lookups(batch, layout)]

    def _item_lookups(self, batch: Batch, layout: Layout) -> list[Lookup]:
        """Each item feature, history and candidates in one: [N] ids."""
        valid_N = layout.join(layout.token_valid(), batch.candidates_valid().reshape(-1))
        return [
            Lookup(feature.table, layout.join(batch.uih_ids[i], batch.cand_ids[i].reshape(-1)), valid_N)
            for i, feature in enumerate(self.config.item_features)
        ]

    def _contextual_lookups(self, batch: Batch, layout: Layout) -> list[Lookup]:
        """Each contextual feature: [B] ids."""
        length_B = layout.uih_lengths_B + layout.cand_lengths_B
        return [
            Lookup(feature.table, batch.contextual_ids[:, c], length_B >= max(1, feature.min_uih_length))
            for c, feature in enumerate(self.config.contextual)
        ]

    def _look_up(self, lookups: list[Lookup]) -> list[Tensor]:
        return [self._embedding_collection(each.table, each.ids, each.valid) for each in lookups]
