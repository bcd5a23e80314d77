"""Feedback-directed optimization: limits that follow what batches ask for, few changes, none once it has settled.

Every host records its batches into a sketch of bounded size; at a boundary all hosts' sketches are merged, and limits
follow by a policy. Sketches are by stack, since limits are, and by topology: statistics of other SparseCores, or of
other stacks, are set aside and never mixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.limits import Most, ladder, most_of
from twinstep.worker.embedding.sparsecore.result import Statistics
from twinstep.worker.embedding.sparsecore.spec import Limits
from twinstep.worker.embedding.sparsecore.stacking import StackPlan

FIELDS = ("ids", "unique", "required")
FORMAT = 1


def topology_of(plan: StackPlan) -> str:
    """Return what statistics are comparable by: SparseCores, and which tables and features are in which stack."""
    stacks = [
        [stack.name, [each.table.name for each in stack.placements], [each.feature.samples for each in stack.features]]
        for stack in plan.stacks
    ]
    text = json.dumps([plan.cores.devices, plan.cores.per_device, stacks])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class Sketch:
    """How often each number was the most of a batch, on the ladder of limits: a few dozen counts, however many batches.

    Exact in the most, and within a step of the ladder, a fifth at most, in every quantile.
    """

    counts: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def add(self, value: int, times: int = 1) -> None:
        """Count one value."""
        step = ladder(value)
        self.counts[step] = self.counts.get(step, 0) + times
        self.most = max(self.most, value)

    def merged(self, other: Sketch) -> Sketch:
        """Return the sketch of both."""
        found = Sketch(dict(self.counts), max(self.most, other.most))
        for step, times in other.counts.items():
            found.counts[step] = found.counts.get(step, 0) + times
        return found

    def quantile(self, share: float) -> int:
        """Return a value that `share` of the batches do not exceed; 1.0: the most of all."""
        if share >= 1:
            return self.most
        left = share * sum(self.counts.values())
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return min(step, self.most)
        return self.most


@dataclass(slots=True)
class Record:
    """What one host's batches asked for, by stack and number."""

    topology: str
    batches: int = 0
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=dict)

    def add(self, statistics: Statistics) -> None:
        """Count one batch."""
        self.batches += 1
        for name, most in most_of(statistics).items():
            mine = self.sketches.setdefault(name, {each: Sketch() for each in FIELDS})
            for each in FIELDS:
                mine[each].add(getattr(most, each))

    def merged(self, other: Record) -> Record:
        """Return the record of both hosts.

        Raises:
            DataError: they are of different topologies.
        """
        if other.topology != self.topology:
            raise DataError("statistics of two topologies", remedy="start records anew when devices or stacks change")
        found = Record(self.topology, self.batches + other.batches)
        for name in {**self.sketches, **other.sketches}:
            mine, theirs = (each.sketches.get(name) or {it: Sketch() for it in FIELDS} for each in (self, other))
            found.sketches[name] = {each: mine[each].merged(theirs[each]) for each in FIELDS}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        stacks = {
            name: {each: {"most": it.most, "counts": sorted(it.counts.items())} for each, it in sketches.items()}
            for name, sketches in sorted(self.sketches.items())
        }
        return {"format": FORMAT, "topology": self.topology, "batches": self.batches, "stacks": stacks}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Record:
        """Read what `to_json` gave.

        Raises:
            DataError: it is something else.
        """
        try:
            if given["format"] != FORMAT:
                raise KeyError(given["format"])
            found = cls(str(given["topology"]), int(given["batches"]))
            for name, sketches in given["stacks"].items():
                found.sketches[name] = {
                    each: Sketch(
                        {int(step): int(times) for step, times in sketches[each]["counts"]}, int(sketches[each]["most"])
                    )
                    for each in FIELDS
                }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"statistics that cannot be read: {error!r}", remedy="remove the file; it is made anew"
            ) from None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FdoPolicy:
    """How limits follow statistics."""

    quantile: float = 1.0
    """Share of batches that limits hold for; the others are split or refused, as preprocessing's policy says."""
    headroom: float = 1.25
    """Times what the quantile asks for."""
    shrink: float = 0.5
    """A limit falls only if this share of it would do: what is enough stays, so that no program is compiled again."""
    least_batches: int = 8
    """Batches before anything is decided."""

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise SpecError(f"a quantile of {self.quantile}", remedy="give more than 0 and at most 1")
        if self.headroom < 1:
            raise SpecError(f"a headroom of {self.headroom}", remedy="give 1 or more, 1.25 say")
        if not 0 <= self.shrink < 1:
            raise SpecError(f"a shrink of {self.shrink}", remedy="give 0 (limits never fall) or more, under 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One stack's limits that changed, and so why the step is compiled again."""

    stack: str
    before: Limits | None
    after: Limits
    reason: str


def decide(plan: StackPlan, record: Record, policy: FdoPolicy) -> tuple[StackPlan, tuple[Change, ...]]:
    """Return the plan with limits that follow a merged record, and what changed. Pure; every host comes to the same.

    A limit grows, to what is wanted, as soon as what batches asked for exceeds it: headroom is there to be used up. It
    falls only by `policy.shrink`. Wanted are ladder steps, so a run whose batches stay alike changes nothing after its
    first boundary.
    """
    if record.topology != topology_of(plan) or record.batches < policy.least_batches:
        return plan, ()
    limits, buffers, changes = {}, {}, []
    for stack in plan.stacks:
        sketches = record.sketches.get(stack.name)
        if sketches is None:
            continue
        wanted = Most(**{each: ladder(sketches[each].quantile(policy.quantile) * policy.headroom) for each in FIELDS})
        old = stack.limits
        ids = _follow(old.max_ids if old else None, wanted.ids, sketches["ids"].quantile(policy.quantile), policy)
        unique = _follow(
            old.max_unique if old else None, wanted.unique, sketches["unique"].quantile(policy.quantile), policy
        )
        slots = wanted.required * plan.cores.per_device
        need = sketches["required"].quantile(policy.quantile) * plan.cores.per_device
        buffer = _follow(stack.buffer, slots, need, policy)
        after = Limits(max_ids=ids, max_unique=unique)
        if after == old and buffer == stack.buffer:
            continue
        limits[stack.name], buffers[stack.name] = after, buffer
        reason = (
            f"{record.batches} batches asked for up to {sketches['ids'].most} ids and {sketches['unique'].most} unique "
            f"ids of a partition, and {sketches['required'].most} slots of a SparseCore"
        )
        changes.append(Change(stack=stack.name, before=old, after=after, reason=reason))
    return plan.with_limits(limits, buffers), tuple(changes)


def _follow(old: int | None, wanted: int, need: int, policy: FdoPolicy) -> int:
    if old is None or need > old or wanted <= old * policy.shrink:
        return wanted
    return old


class FileExchange:
    """Hosts' records in a directory that all of them see: one file each and boundary, never of another run.

    Args:
        run: of the attempt; all hosts are told the same, no other attempt is.
    """

    def __init__(self, folder: Path, host: int, *, run: str) -> None:
        self._folder, self._host, self._run = folder, host, hashlib.sha256(run.encode()).hexdigest()[:16]

    def _path(self, topology: str, boundary: int, host: int) -> Path:
        return self._folder / f"fdo-{topology}-{self._run}-{boundary}-{host}.json"

    def publish(self, record: Record, *, boundary: int) -> None:
        """Write this host's record up to a boundary: the number of the step before which all hosts decide."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".fdo-")
        with os.fdopen(handle, "w") as file:
            json.dump(record.to_json(), file)
        Path(name).replace(self._path(record.topology, boundary, self._host))

    def gather(self, topology: str, hosts: int, *, boundary: int) -> Record | None:
        """Return all hosts' records up to a boundary, merged; None while one has not published its own.

        So every host merges the same records, or none. Other topologies are not looked at.

        Raises:
            DataError: a file cannot be read as a record.
        """
        found: Sequence[Record] = []
        for host in range(hosts):
            path = self._path(topology, boundary, host)
            if not path.exists():
                return None
            try:
                given = json.loads(path.read_text())
            except ValueError as error:
                raise DataError(f"{path.name} cannot be read: {error}", remedy="remove it; it is made anew") from None
            found = [*found, Record.from_json(given)]
        merged = found[0]
        for each in found[1:]:
            merged = merged.merged(each)
        return merged
