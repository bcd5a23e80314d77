"""Which training samples come when, and which are a host's: seeded epochs, hosts, a position to go on from. Pure.

`loader.py` asks. The order depends on the seed and on the samples alone, so neither the batch size nor the number of
hosts changes which sample follows which.

Long and short histories alternate: of any STRATA samples in a row each comes from another STRATA-th of the samples in
order of their histories' lengths. Batches then hold about equally many events, so that a token budget close to the mean
cuts few of them and pads little.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from twinstep.spec.errors import DataError
from twinstep.worker.data.events import Ints
from twinstep.worker.data.samples import Samples

Layout = Literal["rows", "slices"]
STRATA = 16  # batches smaller than this are less even; of more strata each draws from fewer samples


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """The part of every global batch that one host packs; the default is all of it.

    A global batch of B rows is dealt in blocks of ceil(B / hosts) neighbouring rows; the last blocks are filled up with
    dummy rows where hosts do not divide B.
    """

    host: int = 0
    """Which one this is, from 0."""
    hosts: int = 1
    """How many there are."""
    layout: Layout = "slices"
    """`slices`: what a host gives is its slice of every field of the global batch, slot numbers global, and the token
    budget is the batch's: laid end to end the slices are the batch that one host would have packed. For arrays that
    are global, as XLA has them. `rows`: a batch of its own of the host's rows, cut to the host's share of the budget;
    only N is of all hosts' rows. For processes that each compute on their own rows and then exchange gradients."""

    def __post_init__(self) -> None:
        if not 0 <= self.host < self.hosts:
            raise DataError(
                f"host {self.host} of {self.hosts} hosts does not exist", remedy="number hosts from 0 to hosts - 1"
            )

    def block(self, batch_size: int) -> int:
        """Return how many rows each host has, dummy rows included."""
        return -(-batch_size // self.hosts)


class SampleOrder:
    """All training samples in a seeded order, epoch after epoch, without end.

    Args:
        samples: what is gone through; or numbers of rows.
        lengths: [S] int64: events of each sample's user before it, those that no history has room for too: the order
            does not change with the histories' lengths.
        seed: epochs are permutations drawn from (seed, epoch).
    """

    def __init__(self, samples: Samples | Ints, lengths: Ints, *, seed: int) -> None:
        self._count = len(samples)
        self._lengths = lengths
        self._seed = seed
        self._digest = _digest(samples)
        self._epochs: dict[int, Ints] = {}

    def at(self, first: int, count: int) -> Ints:
        """Return samples number `first` to `first` + `count` - 1, counted from 0 over all epochs, [count] int64."""
        numbers = np.arange(first, first + count)
        epochs = numbers // self._count
        return np.concatenate([self._epoch(int(e))[numbers[epochs == e] % self._count] for e in np.unique(epochs)])

    def _epoch(self, epoch: int) -> Ints:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a batch may span two epochs, rarely more
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = even_permutation(self._lengths, np.random.default_rng([self._seed, epoch]))
        return self._epochs[epoch]

    def position(self, taken: int) -> dict[str, Any]:
        """Return where the order stands after `taken` samples, as plain JSON."""
        return {"samples": taken, "seed": self._seed, "epoch_samples": self._count, "digest": self._digest}

    def taken(self, position: dict[str, Any]) -> int:
        """Return how many samples had been taken at a position.

        Raises:
            DataError: it is no position, or one in another order: of another seed, other data or another split.
        """
        here = self.position(0)
        try:
            taken = position["samples"]
            other = [name for name in ("seed", "epoch_samples", "digest") if position[name] != here[name]]
        except (KeyError, TypeError):
            taken, other = None, []
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise DataError(
                f"{str(position)[:200]} is no position in training data",
                remedy="give one that Loader.position returned; or start the run anew",
            )
        if other:
            changed = ", ".join(f"{name} {position[name]} became {here[name]}" for name in other)
            raise DataError(
                f"the training samples are not those that the run began with: {changed}",
                remedy="keep train.seed and, under data, dataset, split and num_candidates; or start the run anew",
            )
        return taken


def even_permutation(lengths: Ints, rng: np.random.Generator) -> Ints:
    """Return a random order of the samples, [S] int64, in which long and short histories alternate.

    Place i takes a sample of stratum strata[i mod STRATA]; strata are neighbours in order of length, of equal ones in
    random order. So any STRATA places in a row take one of each, wherever a batch begins.
    """
    count = len(lengths)
    shuffled = rng.permutation(count)
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    stratum = rng.permutation(STRATA)[np.arange(count) % STRATA]
    places = np.argsort(stratum, kind="stable")  # those of the first stratum, of the second, ...
    within = np.lexsort((rng.random(count), stratum[places]))
    order = np.empty(count, dtype=np.int64)
    order[places] = by_length[within]
    return order


def _digest(samples: Samples | Ints) -> str:
    """Return a checksum of who is asked about what; lengths of histories may change within a run."""
    crc = 0
    columns = (samples.user, samples.cand_start, samples.cand_end) if isinstance(samples, Samples) else (samples,)
    for column in columns:
        crc = zlib.crc32(np.ascontiguousarray(column, dtype="<i8").tobytes(), crc)
    return f"{crc:08x}"
