"""What a loop shares with the loops of a run's other processes: its data, a wish to stop, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from twinstep.spec.job import DataSpec, JobSpec
from twinstep.worker.data.batch import BatchStats
from twinstep.worker.data.datasets import Dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, AnyBatch, MultiHotBatch, MultiHotDataset
from twinstep.worker.data.order import HostShare
from twinstep.worker.train.group import Group
from twinstep.worker.train.processes import Process, Together
from twinstep.worker.train.stop import StopSignal

Value = TypeVar("Value")


class SharedStop(StopSignal):
    """A wish to stop that all processes hear of at the same point of the loop."""

    def __init__(self, stop: StopSignal, together: Together) -> None:
        self._stop, self._together = stop, together

    @property
    def asked(self) -> bool:
        """Whether any process was told to stop; asked by all at once."""
        self._stop.asked = self._together.any(self._stop.asked)
        return self._stop.asked

    @asked.setter
    def asked(self, value: bool) -> None:
        self._stop.asked = value

    def end_at_once(self) -> None:
        """Stop where the process is from now on."""
        self._stop.end_at_once()

    def end_between_steps(self) -> None:
        """Leave it to the loop again."""
        self._stop.end_between_steps()


class AgreedStop(SharedStop):
    """A wish to stop that processes tell each other with every batch, so that asking costs nothing."""

    def __init__(self, stop: StopSignal, together: Together) -> None:
        super().__init__(stop, together)
        self._agreed = False

    @property
    def wanted(self) -> bool:
        """Whether this process was told to stop."""
        return self._stop.asked

    @property
    def asked(self) -> bool:
        """Whether all know that one was told to stop."""
        return self._agreed

    @asked.setter
    def asked(self, value: bool) -> None:
        self._agreed = value

    def agree(self) -> bool:
        """Ask all at once whether one was told to stop; from then on all know."""
        self._agreed = self._agreed or self._together.any(self.wanted)
        return self._agreed


class EvaluationStop(StopSignal):
    """An AgreedStop for an evaluation, whose batches tell nothing: asked by all at once, batch by batch."""

    def __init__(self, stop: AgreedStop) -> None:
        self._stop = stop

    @property
    def asked(self) -> bool:
        """Whether any process was told to stop."""
        return self._stop.agree()

    @asked.setter
    def asked(self, value: bool) -> None:
        self._stop.asked = value


def in_evaluation(stop: StopSignal) -> StopSignal:
    """Return what an evaluation asks in the place of a loop's own."""
    return EvaluationStop(stop) if isinstance(stop, AgreedStop) else stop


class OwnRows(Loader):
    """A loader of which each process packs its own rows only, where rows stand for themselves.

    Batches have the global batch's shapes; rows of other processes are zeros, and are read by nobody. Histories are
    packed whole by each process, since a token's row may be another process's.
    """

    def __init__(self, dataset: MultiHotDataset, spec: DataSpec, *, seed: int, process: Process) -> None:
        super().__init__(dataset, spec, seed=seed, share=HostShare(host=process.rank, hosts=process.count))
        self._process = process

    def train_batch(self, step: int) -> tuple[AnyBatch, BatchStats]:
        """Return training batch number `step`."""
        batch, stats = super().train_batch(step)
        assert isinstance(batch, MultiHotBatch), "histories are packed whole"  # noqa: S101
        rank, count = self._process.rank, self._process.count
        fields = {}
        for name, dim in MULTI_HOT_DIMS.items():
            own = getattr(batch, name)
            size = own.shape[dim]
            whole = own.new_zeros([*own.shape[:dim], size * count, *own.shape[dim + 1 :]])
            whole.narrow(dim, rank * size, size).copy_(own)
            fields[name] = whole
        scaled = {name: getattr(stats, name) * count for name in ("rows", "examples")}
        return batch._replace(**fields), dataclasses.replace(stats, **scaled)


def make_loaders(dataset: Dataset | MultiHotDataset, spec: JobSpec, together: Together) -> tuple[Loader, Loader]:
    """Return what gives training batches, the global ones, and what gives this process's held-out rows."""
    seed = spec.train.seed
    if not together.several:
        one = Loader(dataset, spec.data, seed=seed)
        return one, one
    process = together.process
    share = HostShare(host=process.rank, hosts=process.count, layout="rows")
    held_out = Loader(dataset, spec.data, seed=seed, share=share)
    if together.own_rows:
        return held_out, held_out
    if not isinstance(dataset, MultiHotDataset):
        return Loader(dataset, spec.data, seed=seed), held_out
    return OwnRows(dataset, spec.data, seed=seed, process=process), held_out


def shared_stop(stop: StopSignal, together: Together) -> StopSignal:
    """Return a wish to stop that all processes hear of together."""
    if isinstance(together, Group):
        together.stop = AgreedStop(stop, together)
        return together.stop
    return SharedStop(stop, together) if together.several else stop


def loaded_as(spec: JobSpec, together: Together) -> DataSpec:
    """Return how training batches are packed ahead: in a thread, where a run has several processes anyway."""
    return spec.data.model_copy(update={"loader_workers": 0}) if together.several else spec.data
