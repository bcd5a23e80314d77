"""Communication: gradients averaged over the ranks of a process group, inside the graph, while the backward pass runs.

Dense gradients are joined into buckets in the order in which they become ready; a bucket's all-reduce starts right
behind the last of its gradients and is waited for right before the first op of the update that reads one of them, as
DistributedDataParallel does (Li et al. 2020, arXiv 2006.15704). A table's gradient is a sum over looked-up rows: where
that moves fewer bytes, ids and rows of all ranks are gathered instead, and added up as one rank's would be, so that
the sparse embedding pass still finds a lookup's gradient.

Clipping and all else that the step does with gradients sees the averaged ones. Outputs with one element (losses) are
averaged too; all other outputs, and buffers (batch statistics), stay each rank's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.emit import Emitter
from twinstep.worker.compile.passes.row_values import Lookup, RowValues, find
from twinstep.worker.compile.stages import gradients, hand_over, stage
from twinstep.worker.compile.strategies import Communication

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Group:
    """The process group that gradients are averaged over."""

    name: str
    size: int

    @classmethod
    def current(cls) -> Group:
        """Return the default group.

        Raises:
            CompileError: there is none.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise CompileError(
                "the strategy communication needs a process group, and none was initialized",
                remedy="call torch.distributed.init_process_group first, or leave the strategy out",
            )
        return cls(str(dist.group.WORLD.group_name), dist.get_world_size())  # type: ignore[union-attr]


def ranks(backend: str) -> int:
    """Return how many ranks a step with the strategy runs on.

    Raises:
        CompileError: the backend does not take it, or there is no process group.
    """
    if backend != "inductor":
        raise CompileError(
            f"the {backend} backend does not take the strategy communication",
            remedy="use the inductor backend; the xla backend spreads a step over a mesh instead",
        )
    return Group.current().size


def average_gradients(graph: fx.GraphModule, context: PassContext) -> int:
    """Put the collectives into the graph; return how many values they average.

    Raises:
        CompileError: there is no process group, or a parameter is updated by a gradient that autograd did not leave in
            `.grad`, so that nobody knows what to average.
    """
    wanted = context.strategy(Communication)
    if wanted is None:
        return 0
    return _Averaging(graph, context, wanted, Group.current()).run()


class _Averaging:
    def __init__(self, graph: fx.GraphModule, context: PassContext, wanted: Communication, group: Group) -> None:
        self._graph, self._context, self._wanted, self._group = graph, context, wanted, group
        self._emit = Emitter(graph)
        self._order = {node: index for index, node in enumerate(graph.graph.nodes)}

    def run(self) -> int:
        found = [node for node in self._order if gradients(node)]
        self._check_seen({name for node in found for name in gradients(node)})
        rows = find(self._graph)
        dense: list[fx.Node] = []
        gathered: list[str] = []
        for node in found:
            if not self._readers(node):
                continue
            cone = self._cone(node, rows)
            if cone and self._gathers_less(node, rows):
                gathered += gradients(node)
                self._gather(node, cone, rows)
            else:
                dense.append(node)
        buckets = list(self._buckets(dense))
        for bucket in buckets:
            self._reduce(bucket)
        outputs = self._average_outputs()
        self._graph.graph.eliminate_dead_code()
        self._context.notes["communication"] = {
            "ranks": self._group.size,
            "buckets": [sum(map(_bytes, bucket)) for bucket in buckets],
            "gathered by rows": gathered or "none",
            "outputs averaged": outputs,
            "buffers that stay each rank's own": self._own_buffers() or "none",
        }
        return len(dense) + len(gathered) + outputs

    def _state(self) -> Iterator[tuple[str, str, bool]]:
        """Yield role and name of each slot, and whether the step changes it."""
        results: Any = self._graph.graph.output_node().args[0]
        placeholders = [node for node in self._order if node.op == "placeholder"]
        for slot, result, old in zip(self._context.slots, results, placeholders, strict=False):
            yield slot.role, slot.name, result is not old

    def _check_seen(self, seen: set[str]) -> None:
        for role, name, changed in self._state():
            if role == "parameter" and changed and name not in seen:
                raise CompileError(
                    f"{name} is updated by a gradient that loss.backward() did not put into .grad, "
                    "so ranks cannot share it",
                    remedy="call loss.backward(), or average by hand and leave the strategy communication out",
                )

    def _own_buffers(self) -> list[str]:
        return [name for role, name, changed in self._state() if role == "buffer" and changed]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """Return who reads a gradient as such; ops of the backward pass read it as part of their own chain."""
        return [user for user in node.users if user.op == "output" or stage(user) == "update"]

    def _first(self, nodes: Sequence[fx.Node]) -> fx.Node:
        return min(nodes, key=lambda node: self._order.get(node, len(self._order)))

    # Dense gradients.

    def _buckets(self, nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
        """Join gradients in the order in which they are ready; one dtype a bucket."""
        open_: dict[torch.dtype, list[fx.Node]] = {}
        for node in sorted(nodes, key=self._order.__getitem__):
            bucket = open_.setdefault(node.meta["val"].dtype, [])
            bucket.append(node)
            if sum(map(_bytes, bucket)) >= self._wanted.bucket_bytes:
                yield open_.pop(node.meta["val"].dtype)
        yield from open_.values()

    def _reduce(self, bucket: Sequence[fx.Node]) -> None:
        readers = {node: self._readers(node) for node in bucket}
        ready = max(bucket, key=self._order.__getitem__)
        with self._graph.graph.inserting_before(ready.next):
            flat = [self._flat(node) for node in bucket]
            started = self._collective("all_reduce", flat[0] if len(flat) == 1 else self._call(aten.cat.default, flat))
        with self._graph.graph.inserting_before(self._first([user for each in readers.values() for user in each])):
            averaged = self._unjoined(self._averaged(started), bucket)
        for node, value in zip(bucket, averaged, strict=True):
            hand_over(node, value)
            for user in readers[node]:
                user.replace_input_with(node, value)

    def _unjoined(self, joined: fx.Node, like: Sequence[fx.Node]) -> list[fx.Node]:
        if len(like) == 1:
            return [self._call(aten.view.default, joined, list(like[0].meta["val"].shape))]
        parts = self._call(aten.split_with_sizes.default, joined, [node.meta["val"].numel() for node in like])
        return [
            self._call(aten.view.default, self._part(parts, index), list(node.meta["val"].shape))
            for index, node in enumerate(like)
        ]

    def _average_outputs(self) -> int:
        """Average what the user gets of one element (losses); the rest is the rank's own."""
        output = self._graph.graph.output_node()
        given: Any = output.args[0]
        results = list(given)
        places = [
            index
            for index in range(len(self._context.slots), len(results))
            if results[index].meta["val"].dim() == 0 and results[index].meta["val"].is_floating_point()
        ]
        if not places:
            return 0
        losses = [results[index] for index in places]
        with self._graph.graph.inserting_before(output):
            dtype = losses[0].meta["val"].dtype
            flat = [self._flat(node) for node in losses]
            same = [_cast(self, each, dtype) for each in flat]
            started = self._collective("all_reduce", self._call(aten.cat.default, same))
            averaged = self._unjoined(self._averaged(started), losses)
            for index, node in zip(places, averaged, strict=True):
                results[index] = _cast(self, node, results[index].meta["val"].dtype)
        output.args = (type(given)(results),)
        return len(places)

    # Gradients of tables.

    def _cone(self, node: fx.Node, found: RowValues) -> list[fx.Node]:
        """Return the nodes that add up lookups' gradients to `node`, itself last; none if others read them."""
        row = found.rows.get(node)
        if row is None or not row.lookups or not row.sources:
            return []
        cone, queue = {node}, [node]
        while queue:
            for each in queue.pop().all_input_nodes:
                held = found.rows.get(each)
                if held is not None and held.sources and held.lookups is not None and each not in cone:
                    cone.add(each)
                    queue.append(each)
        inner = all(set(each.users) <= cone for each in cone - {node})
        outer = all(user in self._readers(node) for user in node.users)
        return sorted(cone, key=self._order.__getitem__) if inner and outer else []

    def _gathers_less(self, node: fx.Node, found: RowValues) -> bool:
        """Compare the bytes a rank receives: all others' ids and rows, or twice its part of a ring's all-reduce."""
        lookups = found.rows[node].lookups or ()
        row = _bytes(node) // max(node.meta["val"].shape[0], 1)
        return bool(sum(each.count for each in lookups) * (row + 8) * self._group.size < 2 * _bytes(node))

    def _gather(self, node: fx.Node, cone: Sequence[fx.Node], found: RowValues) -> None:
        readers = self._readers(node)
        started = {}
        for each in cone:
            if each in found.rows[node].sources:
                lookups = found.rows[each].lookups
                assert lookups, "a source adds a lookup"  # noqa: S101
                with self._graph.graph.inserting_before(each):
                    ids, rows = self._lookup(lookups[-1], each)
                    started[each] = self._collective("gather", ids), self._collective("gather", rows)
        made: dict[fx.Node, fx.Node] = {}
        with self._graph.graph.inserting_before(self._first(readers)):
            for each in cone:
                if each in started:
                    ids = self._call(torch.ops._c10d_functional.wait_tensor.default, started[each][0])
                    base: Any = each.args[0]
                    if base not in made:
                        base = self._zeros(each) if each.target is aten.embedding_dense_backward.default else base
                    into = made.get(base, base)
                    rows = self._averaged(started[each][1])
                    made[each] = self._call(aten.index_put.default, into, [ids], rows, True)
                else:
                    made[each] = self._graph.graph.node_copy(each, lambda had: made.get(had, had))
        hand_over(node, made[node])
        for user in readers:
            user.replace_input_with(node, made[node])

    def _lookup(self, lookup: Lookup, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return ids [n] and rows [n, …] of a lookup's gradient; what a mask leaves out adds zero to row 0."""
        count, row = lookup.count, list(node.meta["val"].shape[1:])
        ids = self._call(aten.view.default, self._contiguous(lookup.ids), [count])
        rows = self._call(aten.expand.default, lookup.values, list(lookup.shape))
        rows = self._call(aten.view.default, self._contiguous(rows), [count, *row])
        mask = None if lookup.mask is None else self._call(aten.view.default, self._contiguous(lookup.mask), [count])
        if lookup.skips is not None:
            mask = self._call(aten.ne.Scalar, ids, lookup.skips)
        if mask is not None:
            ids = self._call(aten.where.self, mask, ids, self._number(0, ids))
            wide = self._call(aten.view.default, mask, [count] + [1] * len(row))
            rows = self._call(aten.where.self, wide, rows, self._number(0.0, rows))
        return self._contiguous(ids), self._contiguous(rows)

    # Nodes.

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._emit.call(target, *args, **kwargs)
        node.meta["stage"] = "backward"
        return node

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        part = self._graph.graph.call_function(operator.getitem, (node, index))
        part.meta = {"val": node.meta["val"][index], "stage": "backward"}
        return part

    def _collective(self, kind: str, node: fx.Node) -> fx.Node:
        ops = torch.ops._c10d_functional
        if kind == "gather":
            return self._call(ops.all_gather_into_tensor.default, node, self._group.size, self._group.name)
        return self._call(ops.all_reduce.default, node, "sum", self._group.name)

    def _averaged(self, started: fx.Node) -> fx.Node:
        summed = self._call(torch.ops._c10d_functional.wait_tensor.default, started)
        return self._call(aten.div.Tensor, summed, self._group.size)

    def _flat(self, node: fx.Node) -> fx.Node:
        return self._call(aten.view.default, self._contiguous(node), [node.meta["val"].numel()])

    def _contiguous(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].is_contiguous():
            return node
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _zeros(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        return self._call(aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device)

    def _number(self, number: float, like: fx.Node) -> fx.Node:
        value = like.meta["val"]
        return self._call(aten.full.default, [], number, dtype=value.dtype, device=value.device)


def _cast(averaging: _Averaging, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return averaging._call(torch.ops.prims.convert_element_type.default, node, dtype)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
