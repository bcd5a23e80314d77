"""How much work one device has in a step: tokens, lookups, widths; read by the models of memory and of time.

# Letters: M packed tokens, N tokens that are looked up, S slots of a row, D token width, H heads, V value width,
# A query width, E table width.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.preflight.chips import Where
from twinstep.preflight.shapes import DataShape
from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMv3Spec

LARGEST_CHUNK, SUBLANES = 128, 8  # slots of a row that a fused layer's kernel takes at a time: the most, and its step
SPARSE_ROWS_PER_ID = 4  # rows of a table for each id of a batch below which its gradient is a dense one


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One device's part of a batch."""

    rows: int
    """B."""
    tokens: int
    """M: contextual, history and candidate tokens; of DLRM rows."""
    looked_up: int
    """N: ids that item features, or bags, look up, each feature."""
    slots: int
    """S."""
    candidates: int
    """Candidate slots of all rows."""
    aligned: bool
    """Whether each slot has a token of its own."""


def work_of(spec: JobSpec, shape: DataShape, where: Where) -> Work:
    """Return a device's part of a spec's batch."""
    data = spec.data
    rows = -(-data.batch_size // where.devices)
    if shape.bags:
        ids = rows * sum(each.max_ids for each in shape.bags)
        return Work(rows=rows, tokens=rows, looked_up=ids, slots=1, candidates=rows, aligned=True)
    budget = data.uih_budget or data.uih_len
    slots = len(shape.contextual) + data.uih_len + data.num_candidates
    looked_up = rows * (budget + data.num_candidates)
    return Work(
        rows=rows,
        tokens=looked_up + rows * len(shape.contextual),
        looked_up=looked_up,
        slots=slots,
        candidates=rows * data.num_candidates,
        aligned=budget == data.uih_len,
    )


def batch_ids(spec: JobSpec, shape: DataShape) -> dict[str, int]:
    """Return how many ids a whole batch looks up in each table."""
    data, found = spec.data, {table.name: 0 for table in shape.tables}
    for each in shape.contextual:
        found[each.table] += data.batch_size
    for each in shape.item_features:
        found[each.table] += data.uih_tokens + data.batch_size * data.num_candidates
    for each in shape.bags:
        found[each.table] += data.batch_size * each.max_ids
    return found


def batch_samples(spec: JobSpec, shape: DataShape) -> dict[str, int]:
    """Return how many samples a whole batch looks up in each table: as ids, but a bag is one."""
    bags = {each.table: 0 for each in shape.bags}
    for each in shape.bags:
        bags[each.table] += spec.data.batch_size
    return batch_ids(spec, shape) | bags


def attention_is_fused(spec: JobSpec) -> bool:
    """Say whether attention is a kernel that keeps no scores."""
    model, wanted = spec.model, spec.compile.strategies
    plain = isinstance(model, DLRMv3Spec) and (model.relative_bias != "none" or model.attention_dropout > 0)
    return not plain and (wanted is None or "fused_attention" in wanted)


def layers_are_fused(spec: JobSpec, work: Work) -> bool:
    """Say whether a TPU computes each layer in one kernel, which keeps its input alone."""
    model = spec.model
    if not isinstance(model, DLRMv3Spec) or not attention_is_fused(spec) or model.dropout or not work.aligned:
        return False
    sizes = range(LARGEST_CHUNK, LARGEST_CHUNK // 4 - 1, -SUBLANES)
    return work.slots <= LARGEST_CHUNK or any(work.slots % size == 0 for size in sizes)
