"""DLRM: dense features and multi-hot tables, crossed by dot products (Naumov et al. 2019, arXiv:1906.00091) or by
DCN-v2's low-rank cross layers (Wang et al. 2020, arXiv:2008.13535), as MLPerf's DLRM-DCNv2 has them.

A multi-hot feature is a bag: as many id slots per row as the feature may have, looked up and summed.

# Shapes: B rows, N dense features, F multi-hot features, S id slots of a row over all features, E embedding width,
# V = F + 1 vectors (the dense one first), P = V*(V-1)/2 pairs, D = V*E, R cross rank, Q tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twinstep.worker.data.multi_hot import MultiHotBatch
from twinstep.worker.embedding.collection import EmbeddingCollection, Lookup
from twinstep.worker.embedding.declared import start_tables
from twinstep.worker.embedding.initial import Uniform
from twinstep.worker.models.config import DLRMConfig
from twinstep.worker.models.heads import ModelOutput, count_binary, task_losses
from twinstep.worker.models.layers import Linear


class DLRM(nn.Module):
    """Bottom MLP and summed bags → interaction → over-arch → one logit or prediction per task."""

    def __init__(self, config: DLRMConfig, *, declared: bool = False) -> None:
        """Make the module, its matrices and tables uninitialised: `init_dlrm` fills them, or declares its tables.

        Raises:
            AssertionError: tables of several widths, which an interaction cannot cross.
        """
        super().__init__()
        dims = {table.dim for table in config.tables}
        assert len(dims) == 1, "all tables of a DLRM have one width"  # noqa: S101
        dim, num_vectors = dims.pop(), len(config.features) + 1
        self.config = config
        self._num_binary = count_binary(config.tasks)
        self._embedding_collection = EmbeddingCollection(
            {t.name: (t.rows, t.dim) for t in config.tables}, declared=declared
        )
        self._bottom = relu_mlp((config.num_dense, *config.bottom_dims, dim), last=True)
        self._interaction: DotInteraction | LowRankCross
        if config.interaction == "dot":
            self._interaction = DotInteraction(num_vectors)
            out_dim = dim + num_vectors * (num_vectors - 1) // 2
        else:
            out_dim = num_vectors * dim
            self._interaction = LowRankCross(out_dim, rank=config.cross_rank, num_layers=config.num_cross_layers)
        self._over = relu_mlp((out_dim, *config.over_dims, len(config.tasks)), last=False)

    def forward(self, batch: MultiHotBatch) -> ModelOutput:
        """Return the loss (each task's mean over weighed rows, summed) and the logits, [Q, B, 1]."""
        vectors_BVE = torch.stack((self._bottom(batch.dense), *self._bags(batch)), dim=1)
        logits_QB = self._over(self._interaction(vectors_BVE)).t()
        losses_Q = task_losses(
            logits_QB, batch.labels.flatten(1), batch.weights.flatten(1), num_binary=self._num_binary
        )
        return ModelOutput(loss=losses_Q.sum(), task_losses=losses_Q, logits=logits_QB.reshape(batch.labels.shape))

    def lookups(self, batch: MultiHotBatch) -> list[Lookup]:
        """Return each feature's bags, table by table: what the forward asks the collection for, in that order."""
        features = self.config.features
        ids = torch.split(batch.ids, [feature.max_ids for feature in features], dim=1)
        return [
            Lookup(table.name, ids[f], _below(batch.lengths[:, f], features[f].max_ids))
            for table in self.config.tables
            for f in self._features_of(table.name)
        ]

    def _features_of(self, table: str) -> list[int]:
        return [f for f, feature in enumerate(self.config.features) if feature.table == table]

    def _bags(self, batch: MultiHotBatch) -> list[Tensor]:
        """Return each feature's sum of rows, F tensors [B, E]; a table is looked up once, for all its features."""
        bags: dict[int, Tensor] = {}
        lookups = self.lookups(batch)
        for table in self.config.tables:
            own = self._features_of(table.name)
            if own:
                asked = [each for each in lookups if each.table == table.name]
                bags.update(zip(own, self._embedding_collection.bags(asked), strict=True))
        return [bags[f] for f in range(len(self.config.features))]


def _below(lengths_B: Tensor, slots: int) -> Tensor:
    """Return which of `slots` slots hold an id, [B, slots] bool."""
    return torch.arange(slots, device=lengths_B.device).unsqueeze(0) < lengths_B.unsqueeze(1)


class DotInteraction(nn.Module):
    """The dense vector, and the dot product of every pair of different vectors."""

    _pairs: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("_pairs", row * num_vectors + column, persistent=False)

    def forward(self, vectors_BVE: Tensor) -> Tensor:
        """[B, V, E] → [B, E + P]."""
        products_BVV = torch.bmm(vectors_BVE, vectors_BVE.transpose(1, 2))
        pairs_BP = products_BVV.flatten(1).index_select(1, self._pairs)
        return torch.cat((vectors_BVE[:, 0], pairs_BP), dim=1)


class LowRankCross(nn.Module):
    """Cross layers of DCN-v2: x ← x₀ ⊙ (W_up (W_down x) + b) + x, with x₀ all vectors end to end."""

    def __init__(self, dim: int, *, rank: int, num_layers: int) -> None:
        super().__init__()
        self._down = nn.ModuleList(nn.Linear(dim, rank, bias=False) for _ in range(num_layers))
        self._up = nn.ModuleList(Linear(rank, dim) for _ in range(num_layers))

    def forward(self, vectors_BVE: Tensor) -> Tensor:
        """[B, V, E] → [B, D]."""
        first_BD = vectors_BVE.flatten(1)
        x_BD = first_BD
        for down, up in zip(self._down, self._up, strict=True):
            x_BD = first_BD * up(down(x_BD)) + x_BD
        return x_BD


def relu_mlp(dims: Sequence[int], *, last: bool) -> nn.Sequential:
    """Return Linear → ReLU → …; with `last` a ReLU stands at the end too."""
    layers: list[nn.Module] = []
    for index in range(len(dims) - 1):
        layers.append(Linear(dims[index], dims[index + 1]))
        if last or index < len(dims) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def init_dlrm(model: DLRM, *, seed: int) -> None:
    """Fill the model as the public DLRM does: tables by their own rule, all others from one generator, in their order.

    Tables uniform in ± rows^(-1/2); matrices normal with variance 2 / (in + out); biases with variance 1 / out.
    Cross layers: Xavier normal, zero bias.
    """
    generator = torch.Generator().manual_seed(seed)
    start_tables(model, lambda rows: Uniform(bound=rows**-0.5), seed)
    for name, parameter in model.named_parameters():
        if name.startswith("_embedding_collection."):
            continue
        if parameter.dim() == 2:
            nn.init.xavier_normal_(parameter, generator=generator)
        elif not name.startswith("_interaction."):
            nn.init.normal_(parameter, std=parameter.shape[0] ** -0.5, generator=generator)
