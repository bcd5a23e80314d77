"""HybridParallel: the compiled step of the dense part, with tables that are divided over processes around it.

Each process steps on its own rows of every batch. What it computes is the mean over all rows of all of them:

- each task's loss is weighed by how much of the batch's weight is this process's, so that the mean over processes is
  the loss of one process with the whole batch, however unevenly candidates fall;
- gradients of dense parameters, and of tables that every process keeps, are averaged in the graph (`Communication`);
- rows that were looked up come into the graph as inputs, and their gradients go out; TorchRec sends them to where the
  rows are, divided by the number of processes, and FBGEMM updates.

With `embedding.overlap` the ids of the next batch are on their way while this one is computed: how many go where, while
rows come back; the ids themselves, during the dense step.

# Shapes: Q tasks.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from twinstep.worker.checkpoint.shares import Held
from twinstep.worker.compile import Runner, StepCompiler
from twinstep.worker.compile.inputs import check_finite
from twinstep.worker.compile.strategies import DEFAULT_STRATEGIES, Communication
from twinstep.worker.data.batch import BATCH_DIMS, BatchStats
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnyBatch
from twinstep.worker.embedding.hybrid.given import given_collection, lookups_of
from twinstep.worker.embedding.hybrid.tables import Ids, Sent
from twinstep.worker.embedding.optim import split_parameters
from twinstep.worker.models.heads import ModelOutput
from twinstep.worker.train.engines import Parts, Stepper
from twinstep.worker.train.group import Group
from twinstep.worker.train.hybrid_state import HybridState

Average = Callable[[Sequence[Tensor]], None]
COUNTS = ("rows", "real_tokens", "dummy_tokens", "events_cut", "examples", "padded_candidates")
"""Of BatchStats, what is added up over processes."""


class Share(NamedTuple):
    """What the dense step takes."""

    batch: AnyBatch
    """This process's rows."""
    rows: tuple[Tensor, ...]
    """What divided tables gave for them, in the order of the model's lookups."""
    scale: Tensor
    """[Q] float32: what each task's loss is multiplied by; see `loss_scale`."""


class DenseOutput(NamedTuple):
    """What the dense step gives."""

    loss: Tensor
    """[] float32: mean over processes."""
    task_losses: tuple[Tensor, ...]
    """Q of [] float32: means over processes."""
    logits: Tensor
    """[Q, B, K] float32: of this process's rows, as the model gives them."""
    gradients: tuple[Tensor, ...]
    """Of `Share.rows`, of this process's scaled loss."""


DenseStep = Callable[[nn.Module, Mapping[str, Optimizer], Share], DenseOutput]


def loss_scale(own_Q: Tensor, all_Q: Tensor, processes: int) -> Tensor:
    """Return what makes the mean over processes of each one's weighted mean loss that of all rows together, [Q].

    A process's loss is Σ(loss ⊙ w) / max(Σ w, 1) over its rows; that of all is the same over all rows.
    """
    return (own_Q.clamp(min=1.0) * processes / all_Q.clamp(min=1.0)).to(torch.float32)


def make_dense_step(*, clip_norm: float | None, average: Average | None) -> DenseStep:
    """Return the step of the dense part.

    Args:
        clip_norm: global norm that dense gradients, averaged, are clipped to; None: not clipped.
        average: averages tensors over processes in place; None where the compiler does.
    """

    def dense_step(model: nn.Module, optimizers: Mapping[str, Optimizer], share: Share) -> DenseOutput:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        rows = [each.detach().requires_grad_() for each in share.rows]
        given_collection(model).give(rows)
        output: ModelOutput = model(share.batch)
        losses_Q = output.task_losses * share.scale
        loss = losses_Q.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        told = [each.detach().clone() for each in (loss, *losses_Q.unbind())]
        if average is not None:
            average([*(each.grad for each in model.parameters() if each.grad is not None), *told])
        if clip_norm is not None:
            dense = [parameter for _, parameter in split_parameters(model)[0]]
            torch.nn.utils.clip_grad_norm_(dense, clip_norm, foreach=False)
        for optimizer in optimizers.values():
            optimizer.step()
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in rows]
        return DenseOutput(told[0], tuple(told[1:]), output.logits, tuple(gradients))

    return dense_step


def averaging(group: Group) -> Average:
    """Return what averages tensors over processes, all in one exchange."""

    @torch.no_grad()
    def average(tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([each.reshape(-1) for each in tensors])
        distributed.all_reduce(flat)
        flat /= group.ranks.size
        for each, mean in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
            each.copy_(mean.view_as(each))

    return average


@dataclasses.dataclass(slots=True)
class HybridBatch:
    """A process's rows of a batch, and what is on its way for them."""

    batch: AnyBatch
    stats: BatchStats
    ids: Ids | None
    """None where no table is divided."""
    sent: Sent | None = None
    totals: Totals | None = None
    scale: Tensor | None = None
    """[Q] float32: of `Share`, once totals have arrived."""


class Totals:
    """Sums over all processes of what they have of a batch, on their way.

    The first Q are the tasks' weights, then COUNTS, then how many processes were told to stop.
    """

    def __init__(self, batch: HybridBatch, group: Group, *, stop: bool) -> None:
        self._stats, self._group = batch.stats, group
        self._own_Q = batch.batch.weights.flatten(1).sum(1).to(torch.float64)
        counts = [getattr(batch.stats, name) for name in COUNTS]
        self._values = torch.cat([self._own_Q, torch.tensor([*counts, stop], dtype=torch.float64)])
        self._sum = group.sum(self._values)

    def arrived(self) -> tuple[Tensor, BatchStats, bool]:
        """Wait for them; return the scale of losses, counts of the whole batch, whether a process was told to stop."""
        self._sum.wait()
        all_Q, rest = self._values[: len(self._own_Q)], self._values[len(self._own_Q) :].tolist()
        counts = {name: int(value) for name, value in zip(COUNTS, rest, strict=False)}
        scale = loss_scale(self._own_Q, all_Q, self._group.ranks.size)
        return scale, dataclasses.replace(self._stats, **counts), rest[-1] > 0


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """Return a process's own seed of what it draws from a step on; in 32 bits, all that torch's CPU generator takes."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])


def pinned(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Return a batch in memory that a GPU copies from while the host goes on; as it is for a CPU."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):  # a thread begins with GPU 0, whose memory each process would take some of
        found: AnyBatch = pytree.tree_map(torch.Tensor.pin_memory, batch)
    return found


class HybridStepper(Stepper):
    """Runs steps of HybridParallel.

    The live model stays whole on the host of every process: `push` takes a process's part of its divided tables,
    `pull` brings all parts back into all of them.
    """

    def __init__(self, parts: Parts) -> None:
        assert isinstance(parts.together, Group)  # noqa: S101  the loop's, for this engine
        self._spec, self._group = parts.spec, parts.together
        self._model, self._checks_finite = parts.model, parts.checks_finite
        self._state = HybridState(parts)
        self._tables = self._state.tables
        self.plans = self._state.plans
        self._live_is_current = True
        self._next: HybridBatch | None = None
        self._fault: Exception | None = None
        self._source: Iterator[tuple[HybridBatch, BatchStats]] = iter(())
        self._draw_apart(0)
        super().__init__(self._compiler_of(parts))

    def _draw_apart(self, step: int) -> None:
        """Let each process draw masks of its own for its own rows; the first draws what one process would."""
        rank = self._group.ranks.rank
        if rank:
            torch.manual_seed(seed_of(self._spec.train.seed, rank=rank, step=step))

    def _compiler_of(self, parts: Parts) -> StepCompiler:
        alone, eager = self._group.ranks.size == 1, parts.spec.compile.backend == "eager"
        options = parts.options
        if not alone and not eager:
            asked = options["strategies"]
            options["strategies"] = (*(DEFAULT_STRATEGIES if asked is None else asked), Communication())
        average = averaging(self._group) if eager and not alone else None
        return StepCompiler(
            make_dense_step(clip_norm=parts.spec.train.clip_norm, average=average),
            self._state.view,
            self._state.optimizers,
            batch_dims={f"batch.{name}": dim for name, dim in (BATCH_DIMS | MULTI_HOT_DIMS).items()},
            **options,
        )

    def prepared(self, batches: Iterator[tuple[AnyBatch, BatchStats]]) -> Iterator[tuple[HybridBatch, BatchStats]]:
        """Give each batch with the ids that are to be sent for it."""
        for batch, stats in batches:
            ids = None if self._tables is None else self._tables.ids_of(lookups_of(self._model, batch))
            yield HybridBatch(pinned(batch, self._group.device), stats, ids), stats

    def prepare(self, batch: AnyBatch) -> HybridBatch:
        """Return one batch as `program` takes it, its ids where they are looked up; a collective."""
        nothing = BatchStats(**dict.fromkeys(COUNTS, 0))
        item, _ = next(self.prepared(iter([(batch, nothing)])))
        self._arrive(self._begin(item))
        return item

    def drawn(self, batches: Iterator[tuple[HybridBatch, BatchStats]]) -> Iterator[tuple[HybridBatch, BatchStats]]:
        """Give each batch once its ids are where they are looked up, with the counts of all processes' rows."""
        self.settle()
        self._source, self._next, self._fault = batches, None, None
        while True:
            if self._fault is not None:
                self.settle()
                raise self._fault
            item, self._next = self._next or self._begin_next(), None
            if item is None:
                return
            yield item, self._arrive(item)

    def batch_of(self, batch: HybridBatch) -> AnyBatch:
        """Return the batch that was prepared: this process's rows."""
        return batch.batch

    def _begin_next(self) -> HybridBatch | None:
        """Draw the next batch and begin to send its ids; the same batch on all processes, at the same moment."""
        item, _ = next(self._source, (None, None))
        return None if item is None else self._begin(item)

    def _begin_ahead(self, now: HybridBatch) -> None:
        """Begin with the next batch while `now` is stepped on; what goes wrong with it is raised when it is drawn."""
        try:
            item, _ = next(self._source, (None, None))
        except Exception as error:
            self._fault = error
            # The others count on this process's part of the exchange, without which no step of theirs ends.
            item = HybridBatch(now.batch, now.stats, now.ids)
        self._next = None if item is None else self._begin(item)

    def _begin(self, item: HybridBatch) -> HybridBatch:
        stop = self._group.stop
        item.totals = Totals(item, self._group, stop=stop is not None and stop.wanted)
        item.sent = None if self._tables is None or item.ids is None else self._tables.start(item.ids)
        return item

    def _arrive(self, item: HybridBatch) -> BatchStats:
        assert item.totals is not None  # noqa: S101
        if item.sent is not None:
            item.sent.arrived()
        item.scale, stats, stopped = item.totals.arrived()
        if stopped and self._group.stop is not None:
            self._group.stop.asked = True
        return stats

    def program(self, batch: HybridBatch, *, sizes: Mapping[str, int], step: int) -> Callable[[], DenseOutput]:
        """Return what runs the step; it compiles where it must, once rows are there."""
        return lambda: self._step(batch, sizes, step)

    def _step(self, item: HybridBatch, sizes: Mapping[str, int], step: int) -> DenseOutput:
        if self._checks_finite:
            check_finite(item.batch)
        self._state.take_rates()
        looking = None if self._tables is None or item.sent is None else self._tables.look_up(item.sent)
        if self._spec.embedding.overlap and self._group.several and step + 1 < self._spec.train.steps:
            self._begin_ahead(item)
        rows = None if looking is None else looking.arrived()
        if self._next is not None and self._next.sent is not None:
            self._next.sent.go_on()
        share = self._share(item, () if rows is None else rows.given)
        output: DenseOutput = self._compiler.program(share, sizes=sizes)(share)
        if rows is not None:
            rows.update(output.gradients)
        self._state.updates = step + 1
        self._live_is_current = False
        return output

    def _share(self, item: HybridBatch, rows: tuple[Tensor, ...]) -> Share:
        assert item.scale is not None  # noqa: S101
        share, device = Share(item.batch, rows, item.scale), self._group.device
        if device.type == "cpu":
            return share
        moved: Share = pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True), share)
        return moved

    def runner(self, batch: HybridBatch, *, sizes: Mapping[str, int]) -> Runner:
        """Return the compiled dense step for batches like this one."""
        rows = () if self._tables is None or batch.ids is None else self._tables.nothing(batch.ids)
        return self._compiler.runner(self._share(batch, rows), sizes=sizes)

    def pull(self) -> None:
        """Bring the live model and optimizers up to date on every process; a collective, unless they are so already."""
        if not self._live_is_current:
            self._state.pull()
            self._live_is_current = True

    def pull_own(self) -> Held:
        """Bring up to date what this process is to save; a collective, which moves no rows of divided tables."""
        return {} if self._live_is_current else self._state.pull_own()

    def push(self) -> None:
        """Take the state from the live model and optimizers, which are the same on all processes."""
        self._state.push()
        self._live_is_current = True

    def state(self) -> dict[str, Any]:
        """Return where each process's random numbers stand; a collective."""
        own = base64.b64encode(self.random_state().numpy().tobytes()).decode()
        return {"random": self._group.gather(own), "updates": self._state.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; with another number of processes, or from another engine, the later ones draw anew."""
        random, updates = state.get("random", []), state.get("updates", 0)
        self._state.updates = updates if isinstance(updates, int) else 0
        if len(random) == self._group.ranks.size:
            own = bytearray(base64.b64decode(random[self._group.ranks.rank]))
            self.set_random_state(torch.frombuffer(own, dtype=torch.uint8).clone())
        else:
            self._draw_apart(self._state.updates)

    def settle(self) -> None:
        """Wait for the ids that are on their way."""
        if self._next is not None and self._next.sent is not None:
            self._next.sent.arrived()

    def close(self) -> None:
        """Let what is on its way arrive, where the others are still there."""
        with contextlib.suppress(RuntimeError):
            self.settle()
        self._next = None


def stepper(parts: Parts) -> Stepper:
    """Return the Stepper of `embedding.engine: torchrec`."""
    return HybridStepper(parts)
