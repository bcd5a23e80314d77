"""Stage 5, lower with Inductor: CPU here, CUDA where there is one. State is updated in place, so no table is copied.

Inductor's code asserts sizes and strides at each call but not dtypes; the Runner checks those before it calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.accumulation import Left
from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.generators import set_torch_random_state, torch_random_state
from twinstep.worker.compile.inputs import device_of
from twinstep.worker.compile.lookups import written_too_soon
from twinstep.worker.compile.lower import bags
from twinstep.worker.compile.lower.fused_updates import Updates
from twinstep.worker.compile.lower.inductor_code import load_code, save_code
from twinstep.worker.compile.lower.inductor_pieces import Pieces, Schedule, split
from twinstep.worker.compile.lower.memory import give_back, keep_freed_memory
from twinstep.worker.compile.partition import copy_graph, fold
from twinstep.worker.compile.program import Collect, RowsHeld
from twinstep.worker.compile.stages import place
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import FusedUpdate
from twinstep.worker.compile.updates import Cut, cut_updates
from twinstep.worker.ops.rows import WRITE_ROWS, WRITE_ROWS_IN_PLACE

aten = torch.ops.aten


class InductorBackend:
    """Lowers captured steps; the live tensors of `state` are what its programs read and write."""

    name = "inductor"
    wraps_indices = False  # its code checks them

    def __init__(self, state: TrainState, *, cache_dir: Path | None, in_place: bool = True) -> None:
        self._state = state
        self._in_place = in_place
        self._cache_dir = cache_dir
        if device_of(state.live()).type == "cpu":
            keep_freed_memory()

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return the table Inductor expects its graphs to be decomposed with."""
        return {**select_decomp_table(), **bags.BACKWARD}

    def lower(self, captured: Captured) -> InductorProgram:
        """Compile `captured`.

        Raises:
            CompileError: Inductor refuses the graph; its first line is part of the message.
        """
        hits = counters["inductor"]["fxgraph_cache_hit"]
        cut = self._cut(captured)
        graph, plan = write_back(cut.captured, in_place=self._in_place)
        # A ShapeEnv, or Inductor's cache on disk is passed over; static, or it would see symbols in every shape.
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in captured.example]
        try:
            with (
                tracing(TracingContext(mode)),
                # Random ops as ATen's, so that one seed gives eager's dropout masks.
                config.patch(fx_graph_cache=self._cache_dir is not None, fallback_random=True),
                _directory(self._cache_dir),
            ):
                fold(graph, captured.context, self.name)
                pieces, schedule = split(graph)
                codes = _compile(pieces, schedule, fakes, mode)
        except Exception as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise CompileError(
                f"Inductor cannot lower {_culprit(graph, error)}: {line}", remedy="set compile.backend: xla, or eager"
            ) from error
        cached = counters["inductor"]["fxgraph_cache_hit"] - hits == len(codes)
        code, updates = Pieces(codes, schedule), Updates(cut.groups)
        give_back()
        return InductorProgram(code, plan, updates, self._state, captured.constants, from_cache=cached)

    def _cut(self, captured: Captured) -> Cut:
        """Cut off the updates that fused kernels run, where that was asked for."""
        if captured.context.strategy(FusedUpdate) is None or not self._in_place:
            return Cut(captured, ())
        cut, notes = cut_updates(captured, self._state, self.decompositions())
        captured.context.notes[FusedUpdate.name] = notes
        return cut

    def save(self, program: InductorProgram) -> dict[str, bytes] | None:
        """Return the parts `load` makes the program of in another process; None: it cannot be carried so."""
        parts: dict[str, bytes] = {}
        for number, code in enumerate(program.code.codes):
            piece = save_code(code)
            if piece is None:
                return None
            parts |= {f"code/{number}/{name}": part for name, part in piece.items()}
        plan = {
            "write_back": program.plan.as_json(),
            "updates": program.updates.as_json(),
            "schedule": program.code.schedule.as_json(),
        }
        return {"plan": json.dumps(plan).encode()} | parts

    def load(self, parts: Mapping[str, bytes], constants: Sequence[Tensor]) -> InductorProgram:
        """Return the program that `save` made parts of; raises whatever a damaged one does."""
        plan = json.loads(parts["plan"])
        schedule = Schedule.from_json(plan["schedule"])
        codes = []
        for number in range(1 + max(call.piece for call in schedule.calls)):
            start = f"code/{number}/"
            piece = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
            codes.append(load_code(piece))
        back, updates = WriteBack.from_json(plan["write_back"]), Updates.from_json(plan["updates"])
        return InductorProgram(Pieces(tuple(codes), schedule), back, updates, self._state, constants, from_cache=True)

    def pull(self) -> None:
        """Do nothing: the live tensors are the state."""

    def pull_own(self) -> RowsHeld:
        """Do nothing: the live tensors are the state, all of it."""
        return {}

    def pull_rest(self) -> RowsHeld:
        """Do nothing: the live tensors are the state, all of it."""
        return {}

    def rows_here(self, path: str, ids: Any) -> Any:
        """Nothing is elsewhere."""
        raise KeyError(path)

    def push(self) -> None:
        """Do nothing: the live tensors are the state."""

    def value(self, slot: int) -> Tensor:
        """Return a tensor of the state."""
        return self._state.live()[slot].detach()

    def leave_gradients(self, left: Left) -> None:
        """Set what a step left in `.grad`: its tensors were written in place."""
        if self._state.gradients is not None:
            self._state.gradients.leave(left)

    def random_state(self) -> Tensor:
        """Return the state of torch's own generators: programs draw from them."""
        return torch_random_state(device_of(self._state.live()))

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of torch's own generators."""
        set_torch_random_state(state, device_of(self._state.live()))

    def go_on_from(self, before: InductorBackend) -> None:
        """Do nothing: the live tensors are the state, and random numbers are torch's own."""


def _culprit(graph: fx.GraphModule, error: Exception) -> str:
    """Return the op that Inductor's error names, with the user's line; or the step."""
    named = re.search(r"target: (\S+)", str(error))
    graphs = [each.graph for each in graph.modules() if isinstance(each, fx.GraphModule)]
    nodes = [node for each in graphs for node in each.nodes if named and str(node.target) == named[1]]
    return f"{named[1]}{place(nodes[0])}" if named and nodes else "the step"


def _compile(
    pieces: Sequence[fx.GraphModule], schedule: Schedule, inputs: Sequence[Tensor], mode: FakeTensorMode
) -> tuple[Any, ...]:
    """Compile each piece once, for the fake values that reach it; `inputs` are the whole graph's."""
    values = dict(enumerate(inputs))
    codes: dict[int, Any] = {}
    given: dict[int, list[Tensor]] = {}
    for call in schedule.calls:
        if call.piece not in codes:
            piece, fakes = pieces[call.piece], [values[number] for number in call.takes]
            FakeTensorProp(piece, mode).propagate_dont_convert_inputs(*fakes)
            output = piece.graph.output_node()
            results: Any = output.args[0]
            given[call.piece] = [node.meta["val"] for node in results]
            if len(pieces) > 1:  # what one piece gives, the next was compiled for, strides and all
                output.meta["user_visible_output_idxs"] = list(range(len(results)))
            codes[call.piece] = compile_fx_inner(piece, fakes)
        values.update(zip(call.gives, given[call.piece], strict=True))
    return tuple(codes[number] for number in range(len(pieces)))


@contextlib.contextmanager
def _directory(cache_dir: Path | None) -> Iterator[None]:
    """Let Inductor write to `cache_dir` for the length of a block; it reads the place from the environment."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if cache_dir is not None:
        os.environ[name] = str(cache_dir)
    try:
        yield
    finally:
        if cache_dir is not None:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


@dataclass(frozen=True, slots=True)
class WriteBack:
    """What is left to do after the compiled graph ran."""

    num_outputs: int
    """Results that are the user's; those after them are values of state."""
    late: tuple[int, ...]
    """Slots of state that the values after the user's outputs belong to."""
    shared: frozenset[int]
    """User's outputs that may share memory with the new state, which the next step overwrites."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dataclasses.asdict(self) | {"shared": sorted(self.shared)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> WriteBack:
        """Return the plan that `as_json` wrote."""
        return cls(found["num_outputs"], tuple(found["late"]), frozenset(found["shared"]))


class InductorProgram:
    """A compiled step over the live state."""

    def __init__(
        self,
        code: Pieces,
        plan: WriteBack,
        updates: Updates,
        state: TrainState,
        constants: Sequence[Tensor],
        *,
        from_cache: bool,
    ) -> None:
        self.code = code
        self.plan = plan
        self.updates = updates
        self._state = state
        self._constants = constants
        self.from_cache = from_cache

    def text(self) -> str:
        """Return the code that Inductor wrote."""
        return "\n".join(str(getattr(code, "source_code", "") or "") for code in self.code.codes)

    def start(self, rates: Sequence[Tensor], batch: Sequence[Tensor]) -> Collect:
        """Run one step: update the live state. On a CPU it has run when this returns; on a GPU it is in its queue."""
        state = self._state.tensors()
        with torch.no_grad():
            results = self.code([*state, *rates, *batch, *self._constants])  # empties the list it is given
            if self.plan.late:
                torch._foreach_copy_([state[slot] for slot in self.plan.late], results[self.plan.num_outputs :])
            outputs = results[: self.plan.num_outputs - self.updates.num_gradients]
            self.updates(state, rates, results[len(outputs) : self.plan.num_outputs])
            own = [value.clone() if index in self.plan.shared else value for index, value in enumerate(outputs)]
        return lambda: own


def write_back(captured: Captured, *, in_place: bool = True) -> tuple[fx.GraphModule, WriteBack]:
    """Return the graph with new state copied over old at its end, and only the user's outputs returned.

    A user's output that is (a view of) a placeholder is cloned before the copies, or it would read what they wrote.
    New state that is (a view of) another placeholder (two buffers swapped) is returned and copied after the run:
    Inductor drops clones that are not outputs, so inside the graph the copies would read each other's results.
    So is small new state that could be written before the last lookup was made, such as step counts: an id that names
    no row would leave it written. Not `in_place`, all new state is returned and copied after the run.
    """
    graph = fx.GraphModule(captured.graph, copy_graph(captured.graph.graph))
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    output = nodes[-1]
    results = list(output.args[0])
    new_state, outputs = results[: captured.num_state], results[captured.num_state :]
    late: dict[int, fx.Node] = {}
    too_soon = {slot for slot in written_too_soon(captured.graph, captured.num_state) if _small(new_state[slot])}
    roots = {_root(new) for new in new_state}
    shared = {index for index, value in enumerate(outputs) if _root(value) in roots.difference(placeholders)}
    with graph.graph.inserting_before(output):
        returned = [
            graph.graph.call_function(aten.clone.default, (value,)) if _root(value) in placeholders else value
            for value in outputs
        ]
        for slot, new in enumerate(new_state):
            if _root(new) in placeholders and new is not placeholders[slot]:
                late[slot] = graph.graph.call_function(aten.clone.default, (new,))
        for slot, new in enumerate(new_state):
            if slot in late or new is placeholders[slot]:
                continue
            if not in_place or slot in too_soon:
                late[slot] = new
            else:
                _write(graph.graph, placeholders[slot], new)
    output.args = ((*returned, *late.values()),)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph, WriteBack(len(outputs), tuple(late), frozenset(shared))


LATE_BYTES = 1 << 20  # of one slot; to copy a table at every step would cost more than a clean failure is worth


def _small(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.numel() * value.element_size() <= LATE_BYTES)


def _write(graph: fx.Graph, placeholder: fx.Node, new: fx.Node) -> None:
    """Write new state over old: all of it, or the rows that changed."""
    if new.target is WRITE_ROWS and new.args[0] is placeholder:
        graph.call_function(WRITE_ROWS_IN_PLACE, new.args)
    else:
        graph.call_function(aten.copy_.default, (placeholder, new))


_MAY_VANISH: dict[Any, int] = {
    aten.clone: 0,
    aten.copy: 1,
    aten.repeat: 0,
    aten.constant_pad_nd: 0,
    aten.slice_scatter: 1,
    aten._to_copy: 0,
    aten.ceil: 0,
    aten.floor: 0,
    aten.round: 0,
    aten.trunc: 0,
    aten.pow: 0,
    torch.ops.prims.convert_element_type: 0,
    torch.ops.prims.device_put: 0,
}
"""Ops that Inductor drops where they change nothing, and the argument that is left in their place."""


def _root(node: fx.Node) -> fx.Node:
    """Follow views, parts of views and ops that may vanish, back to the node that owns the memory."""
    while node.op == "call_function":
        source: Any
        if node.target is operator.getitem:
            source = node.args[0]
        elif not isinstance(node.target, torch._ops.OpOverload):
            return node
        elif node.target.overloadpacket is aten.cat:
            parts: Any = node.args[0]
            source = parts[0] if len(parts) == 1 else None
        elif node.target.overloadpacket in _MAY_VANISH:
            source = node.args[_MAY_VANISH[node.target.overloadpacket]]
        elif any(returned.alias_info is not None for returned in node.target._schema.returns):
            source = node.args[0]
        else:
            return node
        if not isinstance(source, fx.Node):
            return node
        node = source
    return node
