"""First values of a DLRMv3's parameters: tables by their own rule, all others from one generator, in the order of their
names' declaration."""

from __future__ import annotations

import torch
from torch import nn

from twinstep.worker.embedding.declared import start_tables
from twinstep.worker.embedding.initial import Normal
from twinstep.worker.models.dlrmv3 import DLRMv3


def init_dlrmv3(model: DLRMv3, *, table_std: float, seed: int) -> None:
    """Fill the model: tables normal, action embeddings normal, matrices Xavier, position tables uniform.

    Biases and norms keep the zeros and ones they are made with. Position and time tables start from a uniform of
    ± rows^(-1/2), each matrix of a stack (contextual maps) by its own fan.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    start_tables(model, lambda _: Normal(std=table_std), seed)
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if name.startswith("_embedding_collection."):
            continue
        if "_action_encoder." in name:
            nn.init.normal_(parameter, std=config.action_init_std, generator=generator)
        elif leaf in ("_position_embeddings_weight", "_timestamp_embeddings_weight"):
            bound = parameter.shape[0] ** -0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        elif leaf == "_batched_contextual_linear_weights":
            for slot in parameter.unbind():
                nn.init.xavier_uniform_(slot, generator=generator)
        elif parameter.dim() == 2 and parameter.numel():
            nn.init.xavier_uniform_(parameter, generator=generator)
