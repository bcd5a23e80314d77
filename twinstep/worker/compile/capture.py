"""Stage 2, capture: the user's own train step, forward, backward and optimizer update, as one graph of ATen ops.

The graph is a pure function `(state…, learning rates…, batch…) → (state'…, outputs…)`: it mutates nothing. Two traces
make it: the first runs the step on fake tensors, the second removes mutations (which the first cannot, since
`requires_grad_()` is not allowed under functionalization) and applies the backend's decompositions. Between them the
scalars that optimizers read back from tensors become tensor arithmetic again.

What one graph cannot hold (control flow on data, a shape that depends on data) is a CaptureError that names the
user's line. The live model and optimizers are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import grad_scaler
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from twinstep.spec.errors import CaptureError, TwinstepError
from twinstep.worker.compile.accumulation import (
    GradientsMatter,
    Left,
    leaves_some,
    put_markers,
    reads_markers,
    told_apart,
)
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.copies import lift_constants
from twinstep.worker.compile.passes.costs import owner
from twinstep.worker.compile.passes.fused_attention import attention_as_one_op
from twinstep.worker.compile.passes.table import FIRST_TRACE_PASSES, PASSES, run_passes
from twinstep.worker.compile.python_side import python_as_it_was
from twinstep.worker.compile.stages import Gradients, KeepNotes, Stages, fill_stages, keep_stages
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import Strategy
from twinstep.worker.compile.structure import OutputTree, Structure, TrainStep, batch_leaves
from twinstep.worker.ops.hstu_attention import fused

Decompositions = Mapping[Any, Callable[..., Any]]

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Captured:
    """A whole step as one functional graph."""

    graph: fx.GraphModule
    """Placeholders: state, learning rates, batch leaves, lifted constants. Outputs: new state, then user outputs."""
    num_state: int
    num_rates: int
    num_batch: int
    leaf_paths: tuple[str, ...]
    """Of the batch, in the order of its placeholders."""
    constants: tuple[Tensor, ...]
    live: frozenset[int]
    """Constants, by position, that are tensors the step reads from elsewhere (a closure, a global, an attribute); the
    others were made by the step or a pass and are the same in every trace."""
    outputs: OutputTree
    example: tuple[Tensor, ...]
    """One tensor per placeholder: the shapes and dtypes the graph was made for."""
    context: PassContext
    changed: Mapping[str, int]
    """Nodes that each pass changed, by its name."""
    from_none: bool = False
    """Whether the step adds to gradients, of which there were none, and leaves none: it is right from none only."""
    left: Left = ()
    """What it leaves in the slots of gradients."""

    @property
    def text(self) -> str:
        """The graph as Python text."""
        return str(self.graph.print_readable(print_output=False))


def capture(
    train_step: TrainStep,
    state: TrainState,
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    batch: Any,
    decompositions: Decompositions,
    *,
    backend: str,
    strategies: Mapping[str, Strategy],
    without: frozenset[str] = frozenset(),
) -> Captured:
    """Return the step as one functional graph.

    Args:
        train_step: called as `train_step(model, optimizer, batch)`, or `(model, batch)` where there is no optimizer.
        batch: an example; its shapes and dtypes are built into the graph, its values are not read. It may be on the
            meta device, as the model may.
        decompositions: ATen ops to write in simpler ones; what the backend lowers decides.
        backend: name of what will lower the graph.
        strategies: what was asked for, by name.
        without: names of passes that are left out.

    Raises:
        CaptureError: the step does what one graph cannot hold; the message names file and line.
    """
    leaves, paths, batch_spec = batch_leaves(batch)
    flat_step = _FlatStep(train_step, state, optimizer, batch_spec, backend)
    example = _without_values([*state.tensors(), *state.learning_rates(), *leaves])
    context = PassContext(
        slots=tuple(state.slots),
        num_rates=len(state.learning_rates()),
        num_batch=len(leaves),
        backend=backend,
        strategies=strategies,
        without=without,
    )
    with fused(attention_as_one_op(context, example)):
        first = _trace_step(flat_step, example, context)
    closed_over = _storages(first) - set(map(_memory, flat_step.lines.made))
    with fx_traceback.preserve_node_meta():  # an Interpreter hands on what a node knows: its stage
        second = make_fx(
            functionalize(KeepNotes(first).run, remove="mutations"),
            decomposition_table=dict(decompositions),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,  # tensors that the step closes over; lift_constants makes inputs of them
        )(*example)
    keep_stages(second)
    changed = run_passes(second, PASSES, context)
    _refuse_changed_state(second, state, example)
    constants = lift_constants(second)
    assert flat_step.outputs is not None, "the trace ran the step"  # noqa: S101
    return Captured(
        graph=second,
        num_state=len(state.slots),
        num_rates=len(state.learning_rates()),
        num_batch=len(leaves),
        leaf_paths=tuple(paths),
        constants=constants,
        live=frozenset(index for index, each in enumerate(constants) if _memory(each) in closed_over),
        outputs=flat_step.outputs,
        example=(*example, *constants),
        context=context,
        changed=changed,
        from_none=flat_step.from_none,
        left=flat_step.left,
    )


def _without_values(example: list[Tensor]) -> list[Tensor]:
    """Return fake CPU tensors where any is on the meta device: its shape is all there is; else the very tensors."""
    if not any(tensor.is_meta for tensor in example):
        return example
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cpu") for each in example]


def _storages(graph: fx.GraphModule) -> set[int]:
    """Return the memory of the tensors that a graph holds as attributes."""
    held = [vars(graph).get(str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    held += [buffer for _, buffer in graph.named_buffers()]
    return {_memory(each) for each in held if isinstance(each, Tensor)}


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's values are; 0: it has none."""
    return 0 if isinstance(tensor, FakeTensor) or tensor.is_meta else tensor.untyped_storage().data_ptr()


class _FlatStep:
    """The user's step as a function of flat tensors, `(state…, rates…, batch…) → (state'…, outputs…)`."""

    def __init__(
        self,
        train_step: TrainStep,
        state: TrainState,
        optimizer: Optimizer | Mapping[str, Optimizer] | None,
        batch_spec: Structure,
        backend: str,
    ) -> None:
        self.state = state
        self.outputs: OutputTree | None = None
        self.from_none = False
        """Whether `.grad` is None when the step starts, not something as after a step before it."""
        self.leaves_none = False
        """Whether the step left every optimized parameter's `.grad` None."""
        self.leaves_some = False
        """Whether the step left gradients that no update took."""
        self.left: Left = ()
        self._backend = backend
        self.lines = _UserLines()
        self.gradients = Gradients()
        self._step, self._optimizer, self._batch_spec = train_step, optimizer, batch_spec

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        num_state, num_rates = len(self.state.slots), self.state.num_rates()
        tensors, rates = inputs[:num_state], inputs[num_state : num_state + num_rates]
        given = self._batch_spec.put_together(inputs[num_state + num_rates :])
        model, optimizer = self.state.model, self._optimizer
        with self.state.swapped(tensors, rates) as swapped:
            no_slots = self.state.gradients is None
            markers = put_markers(swapped.optimized()) if no_slots and not self.from_none else []
            self.gradients.watch([slot.name for slot in self.state.slots], swapped.parameters)
            with torch.set_grad_enabled(True), self.lines, _Functions(self.lines), python_as_it_was(model):
                result = self._step(model, given) if optimizer is None else self._step(model, optimizer, given)
            self.outputs, flat = _split_outputs(result)
            self.leaves_none = all(parameter.grad is None for parameter in swapped.optimized())
            self.leaves_some = leaves_some(markers)
            self.left = tuple(gradient.left() for gradient in swapped.gradients)
            if not swapped.optimizers and any(parameter.grad is not None for parameter in swapped.parameters):
                raise CaptureError(
                    "the step leaves gradients, and has no optimizer that takes them",
                    remedy="call optimizer.step() in the step too, once for several backward() if need be; to look at "
                    "gradients, return torch.autograd.grad(loss, parameters)",
                )
            # XLA has no way but this to start from zeros again; elsewhere a new tensor does.
            return [*swapped.values(zeroed=self._backend == "xla"), *flat]


def _trace_step(flat_step: _FlatStep, example: list[Tensor], context: PassContext) -> fx.GraphModule:
    """Return the first trace, which may still mutate, without numbers that were read out of tensors."""
    first = _first_trace(flat_step, example)
    gradients = flat_step.state.gradients
    if gradients is not None:
        start = len(flat_step.state.slots) - len(gradients.parameters)
        told = told_apart(first, tuple(gradients.parameters), start) - gradients.exact
        if told:
            raise GradientsMatter(told)
    elif reads_markers(first, count=flat_step.state.num_optimized()):
        if not flat_step.leaves_none or flat_step.state.holds_gradients():
            raise GradientsMatter(always=not flat_step.leaves_none)
        # zero_grad() stands at the step's end: each step starts with none.
        flat_step.from_none, flat_step.lines, flat_step.gradients = True, _UserLines(), Gradients()
        first = _first_trace(flat_step, example)
    elif flat_step.leaves_some:
        raise GradientsMatter
    flat_step.lines.mark(first)
    flat_step.gradients.mark()
    run_passes(first, FIRST_TRACE_PASSES, context, functional=False)
    fill_stages(first)
    _refuse_scalars(first)
    _refuse_writes_outside(first)
    return first


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    # torch.backends.mkldnn.flags sets TF32 as well, and warns where there is none.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an op that refuses its inputs: CaptureError says it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _first_trace(flat_step: _FlatStep, example: list[Tensor]) -> fx.GraphModule:
    # _is_compiling_flag makes Adam accept capturable=True on CPU and keep its step count a tensor; it is private, so
    # the lock pins torch and tests hold every supported optimizer against eager.
    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with (
            torch.compiler._non_strict_tracing_context(),
            torch.autograd.set_multithreading_enabled(False),
            fx_traceback.preserve_node_meta(),
            _without_onednn(),  # an LSTM as ops that can be lowered, not as oneDNN's one
            _quiet(),
            Stages(flat_step.state.model, flat_step.state.optimizers),
        ):
            return make_fx(flat_step, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
    except TwinstepError:  # ours, or of a model that says itself what is wrong with it
        raise
    except Exception as error:
        raise _capture_error(error) from error
    finally:
        torch.compiler._is_compiling_flag = compiling


def _split_outputs(result: Any) -> tuple[OutputTree, list[Tensor]]:
    leaves, spec = pytree.tree_flatten(result)
    tensors, constants = [], []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf.detach())
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                "the step returns a Python number read from a tensor (.item(), float(), int())",
                remedy="return the tensor itself; read it after the step",
            )
        elif leaf is None or isinstance(leaf, bool | int | float | str | bytes | torch.dtype | torch.device):
            constants.append((index, leaf))
        else:
            raise CaptureError(
                f"the step returns {type(leaf).__name__}, which may hold tensors where they cannot be seen",
                remedy="return tensors in dicts, lists, tuples or named tuples",
            )
    return OutputTree(spec, tuple(constants)), tensors


class _Functions(TorchFunctionMode):
    """Tells `_UserLines` of functions that check ids in eager PyTorch, and are traced as ops that do not."""

    def __init__(self, lines: _UserLines) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.one_hot:
            return func(*args, **(kwargs or {}))
        with self._lines.within("one_hot"):
            return func(*args, **(kwargs or {}))


class _UserLines(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the user's line of what a graph cannot hold; the trace itself keeps no lines.

    A shape that depends on data, a sparse tensor, a generator of the step's own: refused where they arise. Where a
    number is read out of a tensor is noted, since an optimizer may do so and be helped by a pass; and each op's place
    and name, for a lowering that fails and for ids that name no row.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        """Tensors that the step makes of Python values."""
        self._reads: list[str] = []
        self._within = ""
        """Name of a function whose ops say nothing of what it is."""
        self._refused: CaptureError | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._refused is not None and error[0] is None:
            raise self._refused  # the step caught it, and would be compiled as if it always failed there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._reads.append(_users_place(traceback.extract_stack()))
        elif func is torch.ops.aten.lift_fresh.default:
            self.made.append(args[0])
        if (kwargs or {}).get("generator") is not None:
            self._refuse(
                f"the step draws from a torch.Generator of its own ({func})",
                remedy="draw from torch's default generator, seeded with torch.manual_seed before the first step",
            )
        with fx_traceback.annotate({"place": _place_here(), "by": self._within or func.overloadpacket.__name__}):
            result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.layout is not torch.strided:
                self._refuse(
                    f"the step makes a sparse tensor ({func})",
                    remedy="sparse=False for embeddings: their tables get row updates all the same",
                )
            if isinstance(each, Tensor) and any(isinstance(size, torch.SymInt) for size in each.shape):
                self._refuse(
                    f"a shape depends on a tensor's values ({func})",
                    remedy="keep shapes fixed: torch.where with a mask instead of indexing by it, padding, buckets",
                )
        return result

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Note ops as those of a function."""
        self._within = name
        try:
            yield
        finally:
            self._within = ""

    def _refuse(self, problem: str, *, remedy: str) -> None:
        self._refused = CaptureError(f"{problem}{_users_place(traceback.extract_stack())}", remedy=remedy)
        raise self._refused

    def mark(self, graph: fx.GraphModule) -> None:
        """Write each place into the meta of its node; nodes stand in the order of the reads."""
        reads = [node for node in graph.graph.nodes if node.target is torch.ops.aten._local_scalar_dense.default]
        for node, place in zip(reads, self._reads, strict=False):
            node.meta["place"] = place


def _refuse_scalars(graph: fx.GraphModule) -> None:
    """Raise CaptureError for the first number that is read from a tensor and used as a Python number."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError(
                f"a tensor's value is read as a Python number{node.meta.get('place', '')}",
                remedy="keep it a tensor: torch.where instead of if, tensor arithmetic instead of .item()",
            )


def _refuse_writes_outside(graph: fx.GraphModule) -> None:
    """Raise CaptureError where the step writes to a tensor that it closes over: no state holds the result."""
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written: Any = owner(node.args[0])
            if isinstance(written, fx.Node) and written.op == "get_attr":
                raise CaptureError(
                    f"the step writes to a tensor of shape {list(written.meta['val'].shape)} that is not the model's "
                    f"({node.target})",
                    remedy="make it a buffer of the model (register_buffer)",
                )


def _refuse_changed_state(graph: fx.GraphModule, state: TrainState, example: Sequence[Tensor]) -> None:
    """Raise CaptureError where the step gives a tensor of the state another shape or dtype."""
    results: Any = graph.graph.output_node().args[0]
    for slot, result, before in zip(state.slots, results, example, strict=False):
        now = result.meta["val"]
        if (now.dtype, now.shape) != (before.dtype, before.shape):
            raise CaptureError(
                f"the step turns {slot.name}, {list(before.shape)} {before.dtype}, into {list(now.shape)} {now.dtype}",
                remedy="keep its shape and dtype (tensor.copy_, tensor.add_)",
            )


def _place_here() -> tuple[str, int]:
    """Return file and line of the innermost frame that is the user's; quick, since each op is asked for its own."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<")):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


def _users_place(frames: traceback.StackSummary) -> str:
    """Return ` at FILE:LINE: source` of the innermost frame that is the user's, or nothing."""
    users = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OURS, "<"))]
    return f" at {users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else ""


def _capture_error(error: Exception) -> CaptureError:
    frames = traceback.extract_tb(error.__traceback__)
    place = _users_place(frames)
    kind = type(error).__name__
    if any(frame.filename == grad_scaler.__file__ for frame in frames):
        return CaptureError(
            f"GradScaler decides in Python whether to take the step{place}",
            remedy="use bfloat16, which needs no loss scale: torch.autocast(…, torch.bfloat16) or MixedPrecision()",
        )
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return CaptureError(
            f"the step's control flow or a shape depends on a tensor's values{place}",
            remedy="use torch.where, or pad to a fixed shape and mask; read values outside the step",
        )
    first = (str(error).strip().splitlines() or [kind])[0][:300]
    if ".numpy()" in first or "SymInt" in first:
        return CaptureError(
            f"the step takes a tensor's values into Python{place}: {kind}: {first}",
            remedy="use torch's own functions in place of numpy's and Python's, or read values outside the step",
        )
    return CaptureError(
        f"the step cannot be captured as one graph{place}: {kind}: {first}",
        remedy="run it eagerly (compile.backend: eager) to see whether the step itself fails",
    )
