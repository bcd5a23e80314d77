"""SparseCore semantics in straightforward numpy, for tests: buffers by the letter, lookups and updates in float64.

Nothing here is fast, and nothing is shared with what it checks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from twinstep.worker.embedding.sparsecore.stacking import Stack, StackPlan

Bags = dict[str, list[list[int]]]  # ids of each sample, by feature
PAD = 2**31 - 1


def random_bags(plan: StackPlan, seed: int, longest: int = 5, hot: bool = True) -> Bags:
    """Return bags with empty ones, repeated ids and, if `hot`, an id that every other sample names."""
    random = np.random.default_rng(seed)
    bags: Bags = {}
    for stack in plan.stacks:
        tables = {each.table.name: each.table for each in stack.placements}
        for place in stack.features:
            rows = tables[place.feature.table].rows
            bags[place.feature.name] = [
                [int(each) for each in random.integers(0, rows, random.integers(0, longest + 1))]
                + ([0] if hot and sample % 2 else [])
                for sample in range(place.feature.samples)
            ]
    return bags


def gains_of(bag: list[int], combiner: str) -> float:
    if not bag:
        return 0.0
    return {"sum": 1.0, "mean": 1.0 / len(bag), "sqrtn": 1.0 / math.sqrt(len(bag))}[combiner]


def entries_of(stack: Stack, bags: Bags) -> dict[tuple[int, int], dict[tuple[int, int], float]]:
    """Return {(SparseCore, shard): {(local row, sample): gain}}."""
    count = stack.cores.count
    tables = {each.table.name: each for each in stack.placements}
    found: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    for place in stack.features:
        placement = tables[place.feature.table]
        run = place.feature.samples // count
        for sample, bag in enumerate(bags[place.feature.name]):
            core, within = divmod(sample, run)
            for each in bag:
                shard = (each % count + placement.rotation) % count
                row = each // count + placement.row_offset
                cell = found.setdefault((core, shard), {})
                key = (row, within + place.row_offset // count)
                cell[key] = cell.get(key, 0.0) + gains_of(bag, stack.combiner)
    return found


def plain_buffers(stack: Stack, bags: Bags, slots: int) -> tuple[np.ndarray, ...]:
    """Return (row_pointers, embedding_ids, sample_ids, gains) over all devices, `slots` to a SparseCore.

    Gaps and tails hold rubbish that looks like ids: only row pointers say what counts.
    """
    count, pointers = stack.cores.count, max(stack.cores.count, 8)
    entries = entries_of(stack, bags)
    ends = np.zeros((count, pointers), np.int32)
    ids, samples = np.ones((count, slots), np.int32), np.zeros((count, slots), np.int32)
    gains = np.full((count, slots), 1e6, np.float32)
    for core in range(count):
        at = 0
        for shard in range(pointers):
            at = -(-at // 8) * 8
            for (row, sample), gain in sorted(entries.get((core, shard), {}).items()):
                ids[core, at], samples[core, at], gains[core, at] = row, sample, gain
                at += 1
            ends[core, shard] = at
        assert at <= slots
    return ends.reshape(-1), ids.reshape(-1), samples.reshape(-1), gains.reshape(-1)


def split_buffers(stack: Stack, bags: Bags, slots: int, minibatches: int) -> tuple[np.ndarray, ...]:
    """Return the layout with mini-batches along the vocabulary; bucket = local row % M. `slots` to a device."""
    cores, devices, count = stack.cores.per_device, stack.cores.devices, stack.cores.count
    pointers = max(count, 8)
    entries = entries_of(stack, bags)
    ends = np.full((devices, cores * 64 * pointers), -7, np.int32)
    ids, samples = np.ones((devices, slots), np.int32), np.zeros((devices, slots), np.int32)
    gains = np.full((devices, slots), np.nan, np.float32)
    for device in range(devices):
        at = segment = 0
        for core in range(device * cores, (device + 1) * cores):
            for part in range(minibatches):
                for shard in range(pointers):
                    at = -(-at // 8) * 8
                    for (row, sample), gain in sorted(entries.get((core, shard), {}).items()):
                        if row % minibatches == part:
                            ids[device, at], samples[device, at], gains[device, at] = row, sample, gain
                            at += 1
                    ends[device, segment] = at
                    segment += 1
        assert at <= slots
    return ends.reshape(-1), ids.reshape(-1), samples.reshape(-1), gains.reshape(-1)


def look_up(tables: dict[str, np.ndarray], plan: StackPlan, bags: Bags) -> dict[str, np.ndarray]:
    """Return activations by feature in float64."""
    out = {}
    for stack in plan.stacks:
        for place in stack.features:
            table = tables[place.feature.table].astype(np.float64)
            out[place.feature.name] = np.stack(
                [
                    table[bag].sum(0) * gains_of(bag, stack.combiner) if bag else np.zeros(table.shape[1])
                    for bag in bags[place.feature.name]
                ]
            )
    return out


def table_gradients(plan: StackPlan, bags: Bags, gradients: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by table the float64 gradient, [rows, dim], and which rows were named."""
    found = {}
    for stack in plan.stacks:
        for placement in stack.placements:
            table = placement.table
            total, named = np.zeros((table.rows, table.dim)), np.zeros(table.rows, bool)
            for place in stack.features:
                if place.feature.table == table.name:
                    for sample, bag in enumerate(bags[place.feature.name]):
                        for each in bag:
                            total[each] += gains_of(bag, stack.combiner) * np.asarray(
                                gradients[place.feature.name][sample], np.float64
                            )
                            named[each] = True
            found[table.name] = (total, named)
    return found
