"""A layer around attention as one Pallas kernel for a TPU: what stands between its input and its output stays in VMEM.

`tpu_layers.py` finds the layers and says, as a `Layer`, which nodes of the step's graph one kernel computes. The kernel
takes one row of the batch at a time. Within it the nodes are run in phases, with attention between them: each phase
walks over the row's slots in chunks and evaluates the nodes on a chunk; what a later phase wants of an expensive node
is kept in VMEM, the rest is computed again. Weights are fetched once, and gradients of weights are added up in VMEM
over all rows of a core.

# Shapes: B rows, S slots per row, R slots of a chunk, H heads, A query/key width, V value width, E columns.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from torch import fx
from torchax.ops.mappings import t2j_dtype

from twinstep.worker.compile.lower import pallas_attention
from twinstep.worker.compile.lower.pallas_attention import LANES, Walk
from twinstep.worker.compile.lower.pallas_rows import SUBLANES, Head, Row, columns_of, dot, over_chunks, over_heads
from twinstep.worker.ops.hstu_attention import OPERATOR, OPERATOR_BACKWARD, AttentionRule

aten = torch.ops.aten
prims = torch.ops.prims

VMEM_BYTES = 58 << 20
"""Bytes of VMEM that a kernel may plan for: a core of the smallest has 64 MiB."""
SPARE_BYTES = 4 << 20
"""Of them, what is left to the values of one chunk."""
LARGEST_CHUNK = 128
VALUES_ALIVE = 24
"""Values of a chunk that a kernel without attention is taken to hold at once."""

ATTENTION = (OPERATOR, OPERATOR_BACKWARD)
CASTS = (aten._to_copy.default, prims.convert_element_type.default)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default)

ELEMENTWISE: dict[Any, Callable[..., jax.Array]] = {
    aten.add.Tensor: jnp.add,
    aten.sub.Tensor: jnp.subtract,
    aten.mul.Tensor: jnp.multiply,
    aten.div.Tensor: jnp.divide,
    aten.neg.default: jnp.negative,
    aten.sigmoid.default: jax.nn.sigmoid,
    aten.tanh.default: jnp.tanh,
    aten.exp.default: jnp.exp,
    aten.rsqrt.default: jax.lax.rsqrt,
    aten.relu.default: lambda x: jnp.maximum(x, 0),
}
"""Ops on tokens, and what broadcasts to them: columns' values [E], a token's own [M, 1], and numbers."""


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """What one kernel computes of a step's graph, of which it holds nodes; called on arrays, it runs the kernel."""

    nodes: tuple[fx.Node, ...]
    """All that is computed, in order."""
    tokens: tuple[fx.Node, ...]
    """What goes in by rows: values of [B · S, E], or views of such."""
    weights: tuple[fx.Node, ...]
    """What goes in whole."""
    results: tuple[fx.Node, ...]
    """What comes out by rows."""
    sums: tuple[fx.Node, ...]
    """What comes out added up over all tokens: gradients of weights."""
    rows: int
    """B, over all devices."""
    slots: int
    """S."""
    __name__ = "fused_layer"

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Run the kernel on `tokens`, `weights`, then prefix lengths, target lengths and n of an attention."""
        return run(self, arrays)

    @property
    def attention(self) -> fx.Node | None:
        """One of the attention nodes, if there are any; all have the same rule."""
        return next((node for node in self.nodes if node.target in ATTENTION), None)

    @property
    def chunk(self) -> int:
        """R: without attention, a row is no more than a chunk of tokens."""
        size = self.slots if self.attention is None else chunk_size(self.slots)
        assert size is not None, "layers are only found where slots divide into chunks"  # noqa: S101
        return size


def strip(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, as far as all are made of the same rows."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def width(node: fx.Node, slots: int) -> int:
    """Return E, the numbers of one token."""
    shape = node.meta["val"].shape
    return math.prod(shape[2:] if shape[1:2] == (slots,) and len(shape) > 2 else shape[1:])


def attention_arguments(node: fx.Node) -> list[fx.Node]:
    """Return what an attention node reads by rows: [gradient,] q, k, v, without views."""
    return [strip(each) for each in node.args[: 3 if node.target is OPERATOR else 4]]  # type: ignore[arg-type]


def attention_results(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that stand for an attention node's results."""
    return [node] if node.target is OPERATOR else list(node.users)


@dataclass(slots=True)
class Plan:
    """When each node of a layer is computed, and what is kept for later phases."""

    layer: Layer
    phase: dict[fx.Node, int] = field(default_factory=dict)
    kept: dict[fx.Node, None] = field(default_factory=dict)
    """Nodes that are held in VMEM for the whole of a row."""

    @staticmethod
    def of(layer: Layer) -> Plan:
        """Plan a layer."""
        plan = Plan(layer)
        inside = set(layer.nodes)
        for node in layer.nodes:
            inputs = [each for each in node.all_input_nodes if each in inside]
            plan.phase[node] = max((plan.phase[each] for each in inputs), default=0) + (node.target in ATTENTION)
        for node in layer.nodes:
            if node.target in ATTENTION:
                plan._keep([*attention_arguments(node), *attention_results(node)])
        while plan._keep(plan._missing()):
            pass
        return plan

    @property
    def phases(self) -> int:
        """Number of phases."""
        return max(self.phase.values()) + 1

    def roots(self, phase: int) -> list[fx.Node]:
        """Return what a phase has to compute for others."""
        attended = {each for node in self.layer.nodes if node.target in ATTENTION for each in attention_results(node)}
        wanted = dict.fromkeys((*self.kept, *self.layer.results, *self.layer.sums))
        return [each for each in wanted if self.phase[each] == phase and each not in attended]

    def vmem_bytes(self) -> int:
        """Return the bytes of VMEM that a kernel of this plan takes."""
        layer = self.layer
        by_row = [*layer.tokens, *layer.results]
        total = sum(2 * _padded(layer.slots, width(each, layer.slots)) for each in by_row)
        total += sum(_padded(layer.slots, width(each, layer.slots)) for each in self.kept)
        total += sum(_padded(*_matrix(each.meta["val"].shape)) for each in layer.weights)
        total += sum(2 * _padded(*_matrix(each.meta["val"].shape)) for each in layer.sums)
        if layer.attention is None:  # no chunk is small, and its values are many
            widest = max(width(each, layer.slots) for each in (*layer.tokens, *layer.results))
            return total + VALUES_ALIVE * _padded(layer.slots, widest)
        return total + SPARE_BYTES

    def _keep(self, nodes: Iterable[fx.Node]) -> bool:
        """Keep those of `nodes` that the layer computes; say whether any was not kept before."""
        before = len(self.kept)
        self.kept.update(dict.fromkeys(each for each in nodes if each in self.phase))
        return len(self.kept) > before

    def _missing(self) -> list[fx.Node]:
        """Return expensive nodes, or parts of them, of an earlier phase than they are wanted in."""
        found = []
        for phase in range(self.phases):
            waiting, seen = list(self.roots(phase)), set()
            while waiting:
                node = waiting.pop()
                if node in seen or node not in self.phase or (node in self.kept and self.phase[node] < phase):
                    continue
                seen.add(node)
                if self.phase[node] < phase and _expensive(node):
                    found.append(node)
                elif node.target not in ATTENTION:
                    waiting += node.all_input_nodes
        return found


def _expensive(node: fx.Node) -> bool:
    """Say whether a node is a product of matrices, or a part of one, with a bias or not."""
    while node.target not in (aten.mm.default, aten.addmm.default):
        if isinstance(node.meta["val"], tuple | list):
            return False
        if node.target in (*VIEWS, *CASTS, aten.slice.Tensor, aten.add.Tensor):
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is operator.getitem and node.args[0].target is aten.split_with_sizes.default:  # type: ignore[union-attr]
            node = node.args[0].args[0]  # type: ignore[union-attr,assignment]
        else:
            return False
        if not isinstance(node, fx.Node):
            return False
    return True


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def _padded(height: int, columns: int) -> int:
    """Return the bytes of a float32 matrix in VMEM, whose tiles are 8 by 128."""
    return 4 * (pl.cdiv(height, SUBLANES) * SUBLANES) * (pl.cdiv(columns, LANES) * LANES)


def chunk_size(slots: int) -> int | None:
    """Return R: the most slots, a multiple of 8, that divide a row's; None where only fewer than 32 would."""
    if slots <= LARGEST_CHUNK:
        return slots
    sizes = range(LARGEST_CHUNK, LARGEST_CHUNK // 4 - 1, -SUBLANES)
    return next((size for size in sizes if slots % size == 0), None)


class _Chunk:
    """Evaluates nodes on one chunk of a row's slots."""

    def __init__(self, plan: Plan, phase: int, refs: Mapping[fx.Node, Any], rows: Any) -> None:
        self._plan, self._phase, self._refs, self._rows = plan, phase, refs, rows
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: Any) -> Any:
        """Return a node's value: [R, E] of a token's, [1, E] or a matrix of what goes in whole."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._values:
            self._values[node] = self._read(node)
        return self._values[node]

    def _read(self, node: fx.Node) -> Any:
        plan = self._plan
        if node in plan.layer.weights:
            return self._refs[node][...]
        attended = node in plan.kept and (node.target is OPERATOR or _from_attention(node))
        if node in plan.layer.tokens or attended or (node in plan.kept and plan.phase[node] < self._phase):
            return self._refs[node][self._rows, :].astype(_dtype(node))
        return self._compute(node)

    def _compute(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: Any = node.args
        if target in VIEWS:
            return self.value(args[0])
        if target in ELEMENTWISE:
            return ELEMENTWISE[target](*(self.value(each) for each in args)).astype(_dtype(node))
        if target in CASTS:
            return self.value(args[0]).astype(_dtype(node))
        if target is aten.mm.default:
            return self._product(node, *args)
        if target is aten.addmm.default:
            bias, left, right = args
            return (self.value(bias) + self._product(node, left, right)).astype(_dtype(node))
        if target is aten.sum.dim_IntList:
            (dim,) = args[1]
            return jnp.sum(self.value(args[0]), axis=dim, keepdims=True)
        if target is aten.cat.default:
            return jnp.concatenate([self.value(each) for each in args[0]], axis=1)
        if target is aten.slice.Tensor:
            _, _, start, end = args
            return self.value(args[0])[:, start : min(end, args[0].meta["val"].shape[1])]
        if target is aten.native_layer_norm.default:
            x, weight, bias = (self.value(args[at]) for at in (0, 2, 3))
            return _layer_norm(x, weight, bias, args[4])
        if target is aten.split_with_sizes.default:
            whole, ends = self.value(args[0]), [0]
            for size in args[1]:
                ends.append(ends[-1] + size)
            return [whole[:, start:end] for start, end in itertools.pairwise(ends)]
        return self.value(args[0])[args[1]]  # operator.getitem

    def _product(self, node: fx.Node, left: fx.Node, right: fx.Node) -> jax.Array:
        if left.target is aten.permute.default and left not in self._plan.layer.tokens:
            return dot(self.value(left.args[0]), self.value(right), over=(0, 0))
        if right.target is aten.permute.default and right not in self._plan.layer.weights:
            return dot(self.value(left), self.value(right.args[0]), over=(1, 1)).astype(_dtype(node))
        return dot(self.value(left), self.value(right), over=(1, 0)).astype(_dtype(node))


def _from_attention(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is OPERATOR_BACKWARD  # type: ignore[union-attr]


def _dtype(node: fx.Node) -> Any:
    return t2j_dtype(node.meta["val"].dtype)


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: Any) -> tuple[jax.Array, ...]:
    """Return what `aten.native_layer_norm` gives: the norm, each token's mean, and 1 over its deviation."""
    mean = jnp.mean(x, axis=1, keepdims=True)
    away = x - mean
    scale = jax.lax.rsqrt(jnp.mean(away * away, axis=1, keepdims=True) + eps)
    return away * scale * weight + bias, mean, scale


def _attend(node: fx.Node, row: Row, refs: Mapping[fx.Node, Any]) -> None:
    H, A = node.args[0 if node.target is OPERATOR else 1].meta["val"].shape[2:]  # type: ignore[union-attr]
    V = node.args[2 if node.target is OPERATOR else 3].meta["val"].shape[3]  # type: ignore[union-attr]
    widths = (A, A, V, V) if node.target is OPERATOR else (V, A, A, V, A, A, V)
    nodes = attention_arguments(node)
    results: dict[int, fx.Node] = {0: node}
    if node.target is OPERATOR_BACKWARD:
        results = {each.args[1]: each for each in node.users}  # type: ignore[misc]
    nodes += [results[at] for at in range(len(widths) - len(nodes))]

    def one(head: Any) -> None:
        columns = [columns_of(head, size) for size in widths]
        heads = [Head(refs[each], at, _dtype(each)) for each, at in zip(nodes, columns, strict=True)]
        (row.forward if node.target is OPERATOR else row.backward)(*heads)

    over_heads(H, widths, one)


def _kernel(*refs: Any, plan: Plan, walk: Walk | None, chunk: int) -> None:
    layer, row = plan.layer, None
    if walk is not None:
        prefix_ref, targets_ref, n_ref, *refs = refs  # type: ignore[assignment]
        b = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
        row = Row(walk, chunk, prefix_ref[b], targets_ref[b], n_ref[0])
    named = dict(zip((*layer.tokens, *layer.weights, *layer.results, *layer.sums, *plan.kept), refs, strict=True))
    outside = dict(zip(layer.results, refs[len(layer.tokens) + len(layer.weights) :], strict=False))

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for each in layer.sums:
            named[each][...] = jnp.zeros_like(named[each])

    for phase in range(plan.phases):
        for node in layer.nodes:
            if row is not None and node.target in ATTENTION and plan.phase[node] == phase:
                _attend(node, row, named)
        roots = plan.roots(phase)

        def one(start: Any, phase: int = phase, roots: list[fx.Node] = roots) -> None:
            rows = pl.ds(start, chunk)
            values = _Chunk(plan, phase, named, rows)
            for root in roots:
                value = values.value(root)
                if root in layer.sums:
                    named[root][...] += value.astype(jnp.float32)
                if root in plan.kept:
                    named[root][rows, :] = value.astype(jnp.float32)
                if root in outside:
                    outside[root][rows, :] = value

        if roots:
            over_chunks(layer.slots, chunk, one)


def _cost(plan: Plan, rows: int, cores: int) -> pl.CostEstimate:
    """Return what the kernel costs: all that goes in and out crosses the memory once."""
    layer, S = plan.layer, plan.layer.slots
    tokens = rows * S
    flops = transcendentals = 0
    for node in layer.nodes:
        if node.target in (aten.mm.default, aten.addmm.default):
            columns = node.meta["val"].shape
            left = node.args[-2].meta["val"].shape  # type: ignore[union-attr]
            flops += 2 * tokens * (math.prod(columns) if node in layer.sums else left[1] * columns[1])
        elif node.target in ATTENTION:
            H, A = node.args[1].meta["val"].shape[2:]  # type: ignore[union-attr]
            V = node.args[0 if node.target is OPERATOR_BACKWARD else 2].meta["val"].shape[3]  # type: ignore[union-attr]
            wide = A + V if node.target is OPERATOR else 3 * A + 2 * V
            flops += 2 * rows * H * S * S * wide
            transcendentals += rows * H * S * S
    moved = sum(tokens * width(each, S) * jnp.dtype(_dtype(each)).itemsize for each in (*layer.tokens, *layer.results))
    moved += sum(each.meta["val"].numel() * jnp.dtype(_dtype(each)).itemsize for each in layer.weights) * cores
    moved += sum(each.meta["val"].numel() * 4 for each in layer.sums) * cores
    return pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=moved)


def on_one_device(
    layer: Layer, arrays: Sequence[jax.Array], *, cores: int = 1, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """Run the kernel on the rows of one device.

    Returns:
        results [rows, S, E] each, and sums, each with a first dimension for the device's cores.
    """
    plan, S, walk = Plan.of(layer), layer.slots, None
    if layer.attention is not None:
        *rule, alpha = layer.attention.args[6 if layer.attention.target is OPERATOR else 7 :]
        walk = Walk(S, S, AttentionRule(*rule), alpha)  # type: ignore[arg-type]
    at, end = len(layer.tokens), len(layer.tokens) + len(layer.weights)
    tokens = [each.reshape(-1, S, width(node, S)) for each, node in zip(arrays, layer.tokens, strict=False)]
    weights = [each.reshape(_matrix(each.shape)) for each in arrays[at:end]]
    scalars: tuple[jax.Array, ...] = ()
    if walk is not None:
        prefix_B, targets_B, n = arrays[end:]
        scalars = pallas_attention.scalars(prefix_B, targets_B, n, walk)
    B = tokens[0].shape[0]
    cores = cores if B % cores == 0 else 1
    each_core = B // cores

    def by_row(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, S, columns), lambda core, row, *_: (core * each_core + row, 0, 0))

    sums = [_matrix(node.meta["val"].shape) for node in layer.sums]
    found = pl.pallas_call(
        functools.partial(_kernel, plan=plan, walk=walk, chunk=layer.chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, each_core),
            in_specs=[
                *(by_row(each.shape[2]) for each in tokens),
                *(pl.BlockSpec(each.shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1)) for each in weights),
            ],
            out_specs=[
                *(by_row(width(node, S)) for node in layer.results),
                *(pl.BlockSpec((None, *shape), lambda core, *_: (core, 0, 0)) for shape in sums),
            ],
            scratch_shapes=[pltpu.VMEM((S, width(node, S)), jnp.float32) for node in plan.kept],
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct((B, S, width(node, S)), _dtype(node)) for node in layer.results),  # type: ignore[no-untyped-call]
            *(jax.ShapeDtypeStruct((cores, *shape), jnp.float32) for shape in sums),  # type: ignore[no-untyped-call]
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES + SPARE_BYTES
        ),
        cost_estimate=_cost(plan, B, cores),
        interpret=interpret,
        name=("fused_mlp" if walk is None else "fused_layer") + ("_backward" if layer.sums else ""),
    )(*scalars, *tokens, *weights)
    return tuple(found)


def run(layer: Layer, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Run the kernel, within `pallas_attention.over` on each device's own rows; results have their nodes' shapes."""
    spread = pallas_attention.current()
    if spread is None:
        found = on_one_device(layer, arrays)
    else:
        rows, whole = PartitionSpec(spread.rows), PartitionSpec()  # type: ignore[no-untyped-call]
        lengths = () if layer.attention is None else (rows, rows, whole)
        specs = (*[rows] * len(layer.tokens), *[whole] * len(layer.weights), *lengths)
        found = jax.shard_map(
            lambda *local: on_one_device(layer, local, cores=spread.cores),
            mesh=spread.mesh,
            in_specs=specs,
            out_specs=(rows,) * (len(layer.results) + len(layer.sums)),
            check_vma=False,
        )(*arrays)
    results = [each.reshape(tuple(node.meta["val"].shape)) for each, node in zip(found, layer.results, strict=False)]
    sums = [
        each.sum(0).reshape(tuple(node.meta["val"].shape)).astype(_dtype(node))
        for each, node in zip(found[len(results) :], layer.sums, strict=True)
    ]
    return (*results, *sums)
