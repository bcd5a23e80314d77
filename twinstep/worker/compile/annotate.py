"""Stage 3, annotate: the role, stage, batch dimensions and placement of every value of a captured step.

Nothing is changed: passes and people read it. `Runner.explain` shows it as a table, `draw.py` as a picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, fx

from twinstep.spec.placement import Mesh, Placed, Placement, Spec, place
from twinstep.worker.compile.batch_dims import FACTORIES, follow
from twinstep.worker.compile.batch_labels import Dims, Label, Labels, leaf_dims
from twinstep.worker.compile.padding import by_rows
from twinstep.worker.compile.stages import Stage, gradients, region, stage
from twinstep.worker.compile.state import Slot
from twinstep.worker.compile.strategies import RingEmbedding

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured

aten = torch.ops.aten

Role = Literal[
    "table",
    "parameter",
    "buffer",
    "optimizer state",
    "learning rate",
    "batch",
    "constant",
    "activation",
    "gradient",
    "update",
    "new state",
    "output",
]
ROLES: tuple[Role, ...] = get_args(Role)
"""Every role, in the order they are shown. `update` is what lies between a gradient and the new state."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the step."""

    name: str
    """Name of its node in the graph."""
    op: str
    """What computes it; `placeholder` for inputs."""
    role: Role
    stage: Stage | Literal["input"]
    region: str
    """Path of the module it belongs to, or name of the optimizer; empty where neither is known."""
    label: str
    """Of inputs and new state the slot's or leaf's name, of a parameter's gradient the parameter's name."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    dims: Dims
    """Its batch dimensions."""
    spec: Spec
    """How it is split over the mesh; all None without one."""
    reduce: str = ""
    """sum or max where the op folds the batch away: with a split batch, devices must join their parts here."""

    @property
    def shown_shape(self) -> str:
        """The shape with B in it: `[B·12, 64]`."""
        return f"[{', '.join(str(dim or size) for dim, size in zip(self.dims, self.shape, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Annotations:
    """What is known of a captured step's values."""

    values: tuple[Value, ...]
    """In the order of the graph; of an op with several results one value, of all their bytes."""
    batch_size: int | None
    """B; None where it is not known (one sample, or no leaf with a leading dimension)."""
    mesh: Mesh | None
    placement: Placement | None
    """Of state and batch leaves, in the order of the graph's placeholders without the learning rates."""

    def of_role(self, role: Role) -> tuple[Value, ...]:
        """Return the values of one role."""
        return tuple(value for value in self.values if value.role == role)

    def by_name(self) -> dict[str, Value]:
        """Return the values by their nodes' names."""
        return {value.name: value for value in self.values}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a step is spread over devices, as far as the caller said."""

    mesh: Mesh | None = None
    batch_dims: Mapping[str, int] | None = None
    """Position of the batch dimension by batch leaf; None: the leading one where it is as long as most leaves'."""

    def leaves(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int | None, dict[str, Dims]]:
        """Return the batch size, and the batch dimension of each leaf."""
        return leaf_dims(shapes, declared=self.batch_dims)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise unless the mesh divides the batch.

        Raises:
            CompileError: it does not.
        """
        if self.mesh is not None:
            _, dims = self.leaves(shapes)
            place([_leaf(path, shape, 0, dims[path]) for path, shape in shapes.items()], self.mesh)

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What a CompileKey holds of it."""
        if self.mesh is None:
            return ()
        axes = [(name, str(length)) for name, length in self.mesh.axes]
        dims = "leading" if self.batch_dims is None else str(sorted(self.batch_dims.items()))
        split = (("tables", self.mesh.shard_bytes), ("optimizer state", self.mesh.state_bytes))
        return (*axes, *((f"{what} split from", f"{size} bytes") for what, size in split), ("batch dimensions", dims))


def annotate(captured: Captured, spread: Spread) -> Annotations:
    """Annotate a captured step.

    Raises:
        CompileError: the mesh does not divide the batch.
    """
    mesh = spread.mesh
    inputs = Inputs.of(captured, spread)
    placement = None if mesh is None else place(inputs.placed, mesh)
    labels: Mapping[fx.Node, Labels] = {}
    if inputs.batch_size is not None:
        labels = follow(captured.graph, inputs.seeds, inputs.batch_size)
    annotator = _Annotator(captured, inputs, labels, mesh, placement)
    nodes = [node for node in captured.graph.graph.nodes if node.op in ("placeholder", "call_function")]
    return Annotations(tuple(map(annotator.value, nodes)), inputs.batch_size, mesh, placement)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The placeholders of a captured step, and what is known of them before the graph is looked at."""

    state: tuple[fx.Node, ...]
    rates: tuple[fx.Node, ...]
    batch: tuple[fx.Node, ...]
    placed: tuple[Placed, ...]
    """State, then batch leaves."""
    seeds: Mapping[fx.Node, Dims]
    batch_size: int | None

    @classmethod
    def of(cls, captured: Captured, spread: Spread) -> Inputs:
        """Read them off the graph."""
        nodes = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
        first, second = captured.num_state, captured.num_state + captured.num_rates
        state, rates = nodes[:first], nodes[first:second]
        batch = nodes[second : second + captured.num_batch]
        leaves = dict(zip(captured.leaf_paths, batch, strict=True))
        size, dims = spread.leaves({path: node.meta["val"].shape for path, node in leaves.items()})
        ring = captured.context.strategy(RingEmbedding)
        placed = [
            Placed(
                name=slot.name,
                role="table" if slot.role == "parameter" and is_table(node) else slot.role,
                shape=tuple(node.meta["val"].shape),
                itemsize=node.meta["val"].element_size(),
                of=_owner(slot),
                by_rows=rows_only,
                ring=ring is not None and ring.names(slot.name if slot.role == "parameter" else _owner(slot)),
            )
            for slot, node, rows_only in zip(
                captured.context.slots, state, by_rows(captured.graph, captured.num_state), strict=True
            )
        ]
        for path, node in leaves.items():
            placed.append(_leaf(path, node.meta["val"].shape, node.meta["val"].element_size(), dims[path]))
        seeds = {node: dims[path] for path, node in leaves.items()}
        return cls(tuple(state), tuple(rates), tuple(batch), tuple(placed), seeds, size)


def _owner(slot: Slot) -> str:
    """Return the parameter that a tensor of an optimizer, or a gradient, belongs to."""
    cuts = {"optimizer": 2, "gradient": 1}.get(slot.role)
    return slot.name.split("/", cuts)[cuts] if cuts else ""


def _leaf(path: str, shape: Sequence[int], itemsize: int, dims: Dims) -> Placed:
    at = next((index for index, label in enumerate(dims) if label is not None), None)
    return Placed(name=path, role="batch", shape=tuple(shape), itemsize=itemsize, batch_dim=at)


_LOOKUPS = frozenset({aten.embedding, aten.index, aten._unsafe_index, aten.index_select, aten._embedding_bag})
_SAME = frozenset({aten.view, aten.alias, aten.detach, aten._to_copy, torch.ops.prims.convert_element_type})


def is_table(parameter: fx.Node) -> bool:
    """Say whether a parameter is [rows, dim] and looked up by row."""
    if parameter.meta["val"].dim() != 2:
        return False
    seen, queue = {parameter}, [parameter]
    while queue:
        node = queue.pop()
        for user in node.users:
            packet = getattr(user.target, "overloadpacket", None)
            if packet in _LOOKUPS and user.args and user.args[0] is node:
                return True
            if packet in _SAME and user not in seen:
                seen.add(user)
                queue.append(user)
    return False


_SUMS = frozenset(
    {
        aten.sum,
        aten.mean,
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.dot,
        aten.mv,
        aten.index_put,
        aten._unsafe_index_put,
        aten._unsafe_masked_index_put_accumulate,
        aten.scatter_add,
        aten.index_add,
        aten.embedding_dense_backward,
        aten.convolution_backward,
        aten.linalg_vector_norm,
    }
)
_MAXIMA = frozenset({aten.amax, aten.amin, aten.max, aten.min, aten.any, aten.all})

_STATE_ROLES: Mapping[str, Role] = {
    "table": "table",
    "parameter": "parameter",
    "buffer": "buffer",
    "optimizer": "optimizer state",
    "gradient": "gradient",
}


class _Annotator:
    def __init__(
        self,
        captured: Captured,
        inputs: Inputs,
        labels: Mapping[fx.Node, Labels],
        mesh: Mesh | None,
        placement: Placement | None,
    ) -> None:
        self._inputs, self._labels, self._mesh = inputs, labels, mesh
        self._known: dict[fx.Node, tuple[Role, str]] = dict.fromkeys(inputs.rates, ("learning rate", ""))
        self._specs: dict[fx.Node, Spec] = {}
        for node, placed in zip((*inputs.state, *inputs.batch), inputs.placed, strict=True):
            self._known[node] = (_STATE_ROLES.get(placed.role, "batch"), placed.name)
        if placement is not None:
            self._specs = dict(zip((*inputs.state, *inputs.batch), placement.specs, strict=True))
        results: Any = captured.graph.graph.output_node().args[0]
        for index, node in enumerate(results):
            if not isinstance(node, fx.Node) or node.op == "placeholder":
                continue
            if index < captured.num_state:
                self._known[node] = ("new state", captured.context.slots[index].name)
                if placement is not None:
                    self._specs[node] = placement.specs[index]
            else:
                self._known.setdefault(node, ("output", ""))
        self._by_slot = {placed.name: node for placed, node in zip(inputs.placed, inputs.state, strict=False)}

    def value(self, node: fx.Node) -> Value:
        """Return what is known of a node; to be called in the graph's order."""
        when: Stage | Literal["input"] = "input" if node.op == "placeholder" else stage(node)
        of = gradients(node)
        role, label = self._known.get(node) or self._role(node, when)
        if of and role not in ("new state", "output"):
            role, label = "gradient", ", ".join(of)
        value = node.meta.get("val")
        tensors = [each for each in (value if isinstance(value, tuple | list) else [value]) if isinstance(each, Tensor)]
        single = value if isinstance(value, Tensor) else None
        dims = _one(self._labels.get(node, ())) if single is not None else ()
        dims = dims or ((None,) * single.dim() if single is not None else ())
        return Value(
            name=node.name,
            op="placeholder" if node.op == "placeholder" else str(node.target),
            role=role,
            stage=when,
            region=region(node),
            label=label,
            shape=tuple(single.shape) if single is not None else (),
            dtype=str(single.dtype).removeprefix("torch.") if single is not None else "several",
            bytes=sum(each.numel() * each.element_size() for each in tensors),
            dims=dims,
            spec=self._spec(node, dims, of),
            reduce=self._reduction(node),
        )

    @staticmethod
    def _role(node: fx.Node, when: Stage | Literal["input"]) -> tuple[Role, str]:
        if when == "input" or getattr(node.target, "overloadpacket", None) in FACTORIES:
            return "constant", ""
        roles: dict[Stage, Role] = {"forward": "activation", "backward": "gradient", "update": "update"}
        return roles[when], ""

    def _spec(self, node: fx.Node, dims: Dims, of: tuple[str, ...]) -> Spec:
        if node in self._specs:
            return self._specs[node]
        for name in of:  # a gradient lies where its parameter does
            if name in self._by_slot and self._by_slot[name] in self._specs:
                return self._specs[self._by_slot[name]]
        if self._mesh is None or self._inputs.batch_size is None:
            return (None,) * len(dims)
        axis, length = self._mesh.data
        size = self._inputs.batch_size
        at = next((i for i, dim in enumerate(dims) if dim is not None and dim.size(size) % length == 0), None)
        return tuple(axis if index == at else None for index in range(len(dims)))

    def _reduction(self, node: fx.Node) -> str:
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _SUMS and packet not in _MAXIMA:
            return ""
        had = any(_any(self._labels.get(each, ())) for each in node.all_input_nodes)
        if not had or _any(self._labels.get(node, ())):
            return ""
        return "sum" if packet in _SUMS else "max"


def _one(labels: Labels) -> Dims:
    """Return the labels of a node with one result."""
    return tuple(None if isinstance(each, tuple) else each for each in labels)


def _any(labels: Labels) -> bool:
    found: list[Label | None] = []
    for each in labels:
        found += each if isinstance(each, tuple) else (each,)
    return any(label is not None for label in found)
