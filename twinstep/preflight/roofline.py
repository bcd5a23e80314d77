"""The least time of a step by what the chip can do: operations, memory, interconnect, network; and which one binds.

After Williams et al. 2009, "Roofline", with the collectives as further roofs: what is counted is the work that the step
cannot do without, each roof by its published rate, all of them overlapping perfectly. So it is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.preflight.chips import ChipFacts, Where
from twinstep.preflight.frequency import different_rows
from twinstep.preflight.memory import Memory
from twinstep.preflight.parameters import ACTION_DIM
from twinstep.preflight.report import Bound, StepTime
from twinstep.preflight.shapes import DataShape
from twinstep.preflight.state import is_quiet
from twinstep.preflight.tiles import LANES
from twinstep.preflight.tokens import SPARSE_ROWS_PER_ID, Work, batch_ids, layers_are_fused, work_of
from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMSpec, DLRMv3Spec
from twinstep.spec.module import ModuleSpec

FLOAT = 4
FORWARD_AND_BACKWARD = 3  # products of a step for each of the forward pass: two more for the gradients


def step_time(spec: JobSpec, shape: DataShape, memory: Memory, where: Where) -> StepTime | None:
    """Return the roofline of a step on one device; None where nothing is known of the device."""
    facts = where.facts
    if facts is None:
        return None
    work = work_of(spec, shape, where)
    flops = step_flops(spec, shape, work, fused=where.kind == "tpu" and layers_are_fused(spec, work))
    moved = hbm_traffic(spec, shape, memory, work) + copied_bytes(spec, memory, where)
    sent = sent_bytes(spec, shape, memory, where)
    mixed = "mixed_precision" in (spec.compile.strategies or ())
    seconds: dict[Bound, float] = {
        "compute": flops / (facts.flops_bf16 if mixed else facts.flops_f32),
        "memory": moved / facts.hbm_bytes_per_s,
        "interconnect": sent.inside / facts.ici_bytes_per_s,
        "network": sent.between / facts.dcn_bytes_per_s,
    }
    bound = max(seconds, key=lambda each: seconds[each])
    return StepTime(
        flops=flops,
        hbm_bytes=moved,
        ici_bytes=sent.inside,
        dcn_bytes=sent.between,
        compute_s=seconds["compute"],
        memory_s=seconds["memory"],
        interconnect_s=seconds["interconnect"],
        network_s=seconds["network"],
        seconds=seconds[bound],
        bound=bound,
    )


def step_flops(spec: JobSpec, shape: DataShape, work: Work, *, fused: bool) -> float:
    """Return operations of matrix products of a step, two for each product of numbers.

    Args:
        fused: layers are computed a second time in the backward pass, instead of being kept.
    """
    model = spec.model
    if isinstance(model, DLRMSpec):
        return 2.0 * FORWARD_AND_BACKWARD * work.rows * _dlrm_products(model, shape)
    if isinstance(model, ModuleSpec):
        return 0.0  # nobody knows before it is compiled
    layers = model.num_layers * _layer_products(model, work)
    rest = _rest_products(model, shape, work)
    return 2.0 * (FORWARD_AND_BACKWARD * (layers + rest) + (layers if fused else 0))


def _layer_products(model: DLRMv3Spec, work: Work) -> float:
    heads, values, queries, dim = model.num_heads, model.linear_dim, model.attention_dim, model.transducer_dim
    weights = work.tokens * (dim * 2 * heads * (values + queries) + 3 * heads * values * dim)
    return weights + work.rows * heads * seen_pairs(model, work) * (queries + values)


def seen_pairs(model: DLRMv3Spec, work: Work) -> float:
    """Return the least pairs of tokens that attention of a row must look at, on average over rows.

    A causal row of n tokens has n²/2, less those of candidates, which see no other candidate; by Jensen's inequality
    rows of n tokens on average have no fewer. With a window of w it is n·w − w²/2: the first w tokens see fewer.
    """
    tokens, apart = work.tokens / max(work.rows, 1), work.candidates / max(work.rows, 1)
    near = min(model.max_attn_len or tokens, tokens)
    return max(tokens * near - near**2 / 2 - apart**2 / 2, 0.0)


def _rest_products(model: DLRMv3Spec, shape: DataShape, work: Work) -> float:
    dim, width, hidden = model.transducer_dim, model.embedding_dim, model.hidden_dim
    head = model.head_hidden_dim or hidden
    features = max(len(shape.item_features), 1)
    inputs = [width, *([width * (features - 1)] if features > 1 else []), ACTION_DIM * shape.action_bits]
    tokens = work.looked_up * sum(each * hidden + hidden * dim for each in inputs)
    slots = work.rows * len(shape.contextual) * width * dim
    candidates = work.candidates * (width * features * head + head * dim + dim * head + head * shape.tasks + dim * dim)
    return tokens + slots + candidates


def _dlrm_products(model: DLRMSpec, shape: DataShape) -> float:
    vectors = len(shape.bags) + 1
    crossed = vectors * model.embedding_dim
    total = 0
    if model.interaction == "dot":
        total, out = vectors * vectors * model.embedding_dim, model.embedding_dim + vectors * (vectors - 1) // 2
    else:
        total, out = model.num_cross_layers * 2 * crossed * model.cross_rank, crossed
    bottom = (shape.dense, *model.bottom_dims, model.embedding_dim)
    over = (out, *model.over_dims, shape.tasks)
    for widths in (bottom, over):
        total += sum(widths[index] * widths[index + 1] for index in range(len(widths) - 1))
    return float(total)


def hbm_traffic(spec: JobSpec, shape: DataShape, memory: Memory, work: Work) -> float:
    """Return bytes that a step reads and writes at the least.

    Parameters are read forward and backward and by the update, which writes them; gradients written and read; what
    optimizers keep, both; values that the backward pass reads, both; a row that is looked up is read, its gradient
    written and read, and the row with what is kept of it read and written. A table whose optimizer changes every row is
    read and written whole, with its gradient and what is kept of it.
    """
    parts = {part.name: part.bytes for part in memory.parts}
    dense = 6 * parts["dense parameters"] + 2 * parts["dense optimizer"]  # a gradient is as large as its parameter
    rows = work.looked_up * max(len(shape.item_features), 1) * spec.model.embedding_dim * FLOAT
    every_row = spec.embedding.engine == "dense" and not is_quiet(spec)  # other engines update rows alone
    tables = 3 * parts["tables"] + 2 * parts["table optimizer"] if every_row else 0
    return float(dense + tables + 6 * rows + 2 * (parts["activations"] + parts["attention"] + parts["batch"]))


def copied_bytes(spec: JobSpec, memory: Memory, where: Where) -> float:
    """Return bytes that a TPU moves to copy tables of narrow rows into whole lanes, and to update them as they lie."""
    width = spec.model.embedding_dim
    if where.kind != "tpu":
        return 0.0
    tables = sum(each.bytes for each in memory.state if each.copied)
    return tables * (2 + (width + -width % LANES) / width)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes from one device to others in a step."""

    inside: float
    """Within a slice, or a node."""
    between: float
    """To other slices, or nodes."""


def sent_bytes(spec: JobSpec, shape: DataShape, memory: Memory, where: Where) -> Sent:
    """Return what a step's collectives send from one device.

    Gradients are reduced and new parameters gathered: twice their size but for the device's own share. Rows of split
    tables come to who asks, and their gradients go back; of whole ones, gradients go to all.
    """
    count = where.devices
    if count == 1:
        return Sent(0.0, 0.0)
    reduced = sum(each.whole for each in memory.state if each.role == "parameter")
    exchanged = 0.0
    ids, quiet, width = batch_ids(spec, shape), is_quiet(spec), spec.model.embedding_dim * FLOAT
    tables = [each for each in memory.state if each.role == "table"]
    for table, kept in zip(shape.tables, tables, strict=True):
        asked = ids[table.name]
        mine = different_rows(asked // count, table.rows, zipf_of(spec))
        if kept.split:
            exchanged += 2 * mine * width
        elif quiet and table.rows >= SPARSE_ROWS_PER_ID * asked:
            exchanged += asked * width
        else:
            reduced += kept.whole
    away = (count - 1) / count
    per_slice = count // where.slices
    inside = 2 * reduced * away + exchanged * away
    if where.slices == 1:
        return Sent(inside, 0.0)
    apart = (where.slices - 1) / where.slices
    return Sent(inside, 2 * reduced * apart / max(per_slice, 1) + exchanged * apart)


def zipf_of(spec: JobSpec) -> float:
    """Return the exponent of the popularity of ids: the spec's for synthetic data, else the usual one."""
    return spec.data.synthetic.zipf if spec.data.dataset.startswith("synthetic") else USUAL_ZIPF


USUAL_ZIPF = 1.05  # of ids in click logs: a rule of thumb, where no statistics are given


def rates_in_words(facts: ChipFacts) -> str:
    """Return the rates that a step is held against."""
    return (
        f"{facts.flops_bf16 / 1e12:.0f} TFLOP/s, {facts.hbm_bytes_per_s / 1e9:,.0f} GB/s of memory, "
        f"{facts.ici_bytes_per_s / 1e9:,.0f} GB/s to other devices ({facts.source})"
    )
