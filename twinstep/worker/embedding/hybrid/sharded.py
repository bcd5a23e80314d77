"""The door to TorchRec and FBGEMM: modules sharded by a plan, and their tensors by table. Nothing else imports them.

A CPU's limit, seen with torchrec 1.8 and fbgemm-gpu-cpu 1.8: a data-parallel EmbeddingCollection fails.
Tables that are kept on every process never come here: the compiled step has them, and averages their gradients.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from twinstep.spec.optimizers import SparseOptimizerSpec
from twinstep.spec.table_names import module_name, table_name
from twinstep.worker.embedding.hybrid.plan import TablePlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these say of torch's own deprecations is not for a run's log
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# TorchRec calls what torch 2.13 gives other names; that is for its makers, and would be said at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

Sharded = Any
"""A ShardedEmbeddingCollection or ShardedEmbeddingBagCollection."""
KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,  # on GPUs alone; it touches the rows that a batch names
}
STATE = {
    "sgd": {},
    "adagrad": {"momentum1": "sum"},
    "rowwise_adagrad": {"momentum1": "sum"},
    "adam": {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
}
"""What FBGEMM keeps of a table, by TorchRec's key, and the name that the `torch.optim` optimizer has for it."""


def keyed(names: Sequence[str], values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    """Return TorchRec's form of features laid end to end."""
    return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)


def shard(
    tables: Mapping[TablePlan, Sequence[str]],
    *,
    pooled: bool,
    optimizer: SparseOptimizerSpec,
    device: torch.device,
    group: distributed.ProcessGroup,
    on_host: int,
) -> Sharded:
    """Return a sharded module of uninitialised tables; a collective.

    Args:
        on_host: processes of a host: process r has GPU r modulo so many, which its shards name.

    The plan is ours throughout: TorchRec's planner knows no bags divided by rows on a CPU, though its modules do.
    """
    fused = {"optimizer": KINDS[optimizer.kind], "learning_rate": optimizer.lr}
    if optimizer.kind != "sgd":
        fused["eps"] = optimizer.eps
    if optimizer.kind == "adam":
        fused["beta1"], fused["beta2"] = optimizer.betas
    if optimizer.weight_decay:
        fused["weight_decay"] = optimizer.weight_decay
    sharder: Any = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(fused_params=fused)
    whole = _module(tables, pooled=pooled)
    wanted = {module_name(plan.table.name): _placed(plan) for plan in tables}
    with _quietly():
        found = construct_module_sharding_plan(
            whole, wanted, sharder, local_size=on_host, world_size=group.size(), device_type=device.type
        )
        return sharder.shard(whole, found, ShardingEnv.from_process_group(group), device)


def _placed(plan: TablePlan) -> Any:
    if plan.kind == "row_wise":
        return row_wise(compute_kernel="fused")
    if plan.kind == "column_wise":
        return column_wise(ranks=list(plan.processes), compute_kernel="fused")
    return table_wise(rank=plan.processes[0], compute_kernel="fused")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep out of a run's log what TorchRec tells its own developers."""
    logger = logging.getLogger("torchrec")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _module(tables: Mapping[TablePlan, Sequence[str]], *, pooled: bool) -> nn.Module:
    common = [
        {
            "name": module_name(t.table.name),
            "num_embeddings": t.table.rows,
            "embedding_dim": t.table.dim,
            "feature_names": list(names),
        }
        for t, names in tables.items()
    ]
    device = torch.device("meta")
    if pooled:
        bags = [EmbeddingBagConfig(pooling=PoolingType.SUM, **each) for each in common]
        made: nn.Module = EmbeddingBagCollection(tables=bags, device=device)
    else:
        made = EmbeddingCollection(tables=[EmbeddingConfig(**each) for each in common], device=device)
    return made


def set_learning_rate(sharded: Sharded, rate: float) -> None:
    """Let all updates to come have this learning rate."""
    optimizer = sharded.fused_optimizer
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()  # updates nothing: it hands the rate to the kernels


def set_steps(sharded: Sharded, steps: int) -> None:
    """Let the optimizer count on from so many steps, by which Adam corrects its moments.

    FBGEMM counts on the host, and looks at its other counter, which TorchRec's `set_optimizer_step` sets, only while it
    has counted nothing.
    """
    for module in kernels(sharded.fused_optimizer):
        for counter in (module.iter, module.iter_cpu):
            counter.fill_(steps)


def kernels(optimizer: Any) -> Iterator[Any]:
    """Yield FBGEMM's modules that a fused optimizer, which may be of others, stands for."""
    if hasattr(optimizer, "_emb_module"):
        yield optimizer._emb_module
    for _, each in getattr(optimizer, "optimizers", ()):
        yield from kernels(each)


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one table's tensor, which one process has."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: int
    here: Tensor | None
    """The owner's own memory; None elsewhere."""

    def everywhere(self, group: distributed.ProcessGroup) -> Tensor:
        """Return the values, on every process: the owner sends them.

        Raises:
            RuntimeError: this process is the owner, and has them not.
        """
        if self.here is None and distributed.get_rank(group) == self.owner:
            raise RuntimeError(f"process {self.owner} lacks the piece at {self.offsets} of a table's tensor")
        device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
        values = torch.empty(self.sizes, device=device) if self.here is None else self.here.contiguous()
        if group.size() > 1:
            distributed.broadcast(values, group=group, group_src=self.owner)
        return values


@dataclass(frozen=True, slots=True)
class Divided:
    """One tensor of a table, in pieces."""

    table: str
    name: str
    """`weight`, or what the optimizer of `torch.optim` calls it."""
    pieces: tuple[Piece, ...]
    """In the same order everywhere."""

    @staticmethod
    def window(whole: Tensor, piece: Piece) -> Tensor:
        """Return the view of the whole tensor that a piece is of; a value per row is [rows, 1] there."""
        view = whole.view(-1) if len(piece.offsets) == 1 else whole
        for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        return view


def divided_tensors(sharded: Sharded, kind: str) -> list[Divided]:
    """Return every table's weight, and what the optimizer keeps of it, in the same order everywhere.

    The optimizer's own state_dict has entries only for what is here, so where its pieces are follows from the weight's.

    Raises:
        RuntimeError: the optimizer keeps other tensors than are known of its kind.
    """
    kept: dict[str, dict[str, Any]] = {}
    for path, entries in sharded.fused_optimizer.state_dict()["state"].items():
        table = table_name(path.split(".")[-2])
        kept[table] = {key.rpartition(".")[2]: tensor for key, tensor in entries.items()}
        if kept[table].keys() != STATE[kind].keys():
            raise RuntimeError(
                f"FBGEMM keeps {sorted(kept[table])} of table {table}, not {sorted(STATE[kind])} of {kind}"
            )
    found = []
    for path, tensor in sorted(sharded.state_dict().items()):
        table = table_name(path.split(".")[-2])
        shards = [each for each in tensor.metadata().shards_metadata if all(each.shard_sizes)]
        found.append(Divided(table, "weight", _pieces(shards, tensor, dims=2)))
        for key, name in STATE[kind].items():
            dims = 1 if kind == "rowwise_adagrad" else 2
            found.append(Divided(table, name, _pieces(shards, kept.get(table, {}).get(key), dims=dims)))
    return found


def _pieces(shards: Sequence[Any], tensor: Any, *, dims: int) -> tuple[Piece, ...]:
    """Return the pieces of a tensor that is divided as a weight's `shards` are, by their first `dims` dimensions."""
    local = [] if tensor is None else tensor.local_shards()
    here = {tuple(each.metadata.shard_offsets): each.tensor for each in local}
    pieces = []
    for each in shards:
        offsets, sizes = tuple(each.shard_offsets[:dims]), tuple(each.shard_sizes[:dims])
        pieces.append(Piece(offsets, sizes, each.placement.rank(), here.get(offsets)))
    return tuple(pieces)
