"""Stage 7, recompile: a StepCompiler keeps one Runner per CompileKey and says why it compiles.

compiler = StepCompiler(train_step, model, optimizers, backend="inductor", on_event=print)
outputs = compiler(batch)      # compiles at a key not seen before, then runs
compiler.pull()                # before reading parameters (state_dict() does so itself): with XLA they are elsewhere
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.spec.placement import Mesh
from twinstep.worker.compile.accumulation import GradientsMatter
from twinstep.worker.compile.annotate import Spread
from twinstep.worker.compile.around import Around, KeyPart
from twinstep.worker.compile.events import CompileEvent, CompileWarning
from twinstep.worker.compile.generators import set_torch_random_state, torch_random_state
from twinstep.worker.compile.inputs import check_backend, check_devices, check_finite, device_of
from twinstep.worker.compile.inspection import Capture, Look
from twinstep.worker.compile.kept import Kept, Made, pack, unpack
from twinstep.worker.compile.key import (
    FIRST,
    CompileKey,
    cpu_threads,
    named_sizes,
    reason,
    reason_after,
    tensor_info,
    told,
    versions,
)
from twinstep.worker.compile.lifted import BackendName, Lifted
from twinstep.worker.compile.program import RowsHeld
from twinstep.worker.compile.runner import Runner
from twinstep.worker.compile.shipped import Shipped
from twinstep.worker.compile.stamp import Stamp
from twinstep.worker.compile.standing import batch_info, reach, standing
from twinstep.worker.compile.state import Optimizers, TrainState
from twinstep.worker.compile.store import MAX_BYTES, ProgramStore
from twinstep.worker.compile.storm import MAX_COMPILES, WINDOW, StormWatch
from twinstep.worker.compile.strategies import Communication, Strategy, resolve
from twinstep.worker.compile.structure import TrainStep, batch_leaves, take_apart

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured

MAX_RUNNERS = 8  # programs kept in memory; an executable and its workspace are tens of MB


class StepCompiler:
    """Compiles a train step for each shape it meets; all its programs share one state.

    Args:
        train_step: `(model, optimizer, batch) → outputs`, plain PyTorch: zero_grad, forward, backward, step.
        optimizer: one, several by name, or None for a step that only evaluates (called as `(model, batch)`).
        backend: what lowers the graph; `eager` calls `train_step` as it is.
        strategies: what to ask of the compiler; None: DEFAULT_STRATEGIES.
        mesh: devices to spread the step over, `{"data": 8}`; with the xla backend.
        batch_dims: position of the batch dimension by batch leaf; leaves that are not named have none. None: the
            leading one, wherever it is as long as most leaves'.
        cache_dir: directory of the cache on disk; None: no cache.
        in_place: False writes no new state over old inside the program: slower, and without a cache on disk; for
            finding faults.
        ahead: nothing will run here, so that the model may be on the meta device.
        shipped: programs that were compiled ahead for the devices of here; one that fits is taken, else a warning says
            why not, and the step is compiled.
        around: what an embedding engine does within the program; with the xla backend.
        check_finite: refuse a batch that holds NaN or an infinity (DataError, which names the leaf), at the cost of
            reading all its numbers before each step.
        cache_max_bytes: what programs on disk may take together.
        on_start: called with the reason before each compile.
        on_event: called with a CompileEvent after each compile.
        on_warning: called with a CompileWarning.
        max_runners: programs kept in memory.
        storm: how many compiles in how many steps are too many.
    """

    def __init__(
        self,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        backend: BackendName = "inductor",
        devices: int = 1,
        strategies: Sequence[Strategy | str] | None = None,
        mesh: Mesh | Mapping[str, int] | None = None,
        batch_dims: Mapping[str, int] | None = None,
        cache_dir: str | Path | None = None,
        in_place: bool = True,
        ahead: bool = False,
        shipped: Shipped | None = None,
        around: Around | None = None,
        check_finite: bool = False,
        cache_max_bytes: int = MAX_BYTES,
        on_start: Callable[[str], None] | None = None,
        on_event: Callable[[CompileEvent], None] | None = None,
        on_warning: Callable[[CompileWarning], None] | None = None,
        max_runners: int = MAX_RUNNERS,
        storm: tuple[int, int] = (MAX_COMPILES, WINDOW),
    ) -> None:
        check_backend(backend, get_args(BackendName))
        _check_around(around, backend)
        self._step, self._model, self._optimizer = train_step, model, optimizer
        self._strategies = resolve(strategies)
        self._spread = Spread(mesh=None if mesh is None else Mesh.of(mesh), batch_dims=batch_dims)
        self._devices = devices if self._spread.mesh is None else self._spread.mesh.size
        if Communication.name in self._strategies:
            self._devices = _ranks(backend)
        if self._spread.mesh is not None and backend != "xla":
            raise CompileError(
                f"the {backend} backend takes no mesh",
                remedy="use the xla backend, or Communication() over a process group, one process a device",
            )
        self._around = around
        self._on_start = on_start
        self._on_event, self._on_warning = on_event, on_warning
        self._max_runners = max_runners
        self._cache_dir = Path(cache_dir) if cache_dir is not None and in_place else None
        self._in_place, self._ahead = in_place, ahead
        self._shipped = shipped if backend == "xla" else None
        self._check_finite = check_finite
        self._store = self._open_store(cache_max_bytes)
        self._runners: OrderedDict[CompileKey, Runner] = OrderedDict()
        self._last: CompileKey | None = None
        self._went_before: Mapping[str, Any] = {}
        self._gradients: frozenset[str] | None = None
        """What TrainState is told of gradients; a capture finds that they matter."""
        self._storm = StormWatch(max_compiles=storm[0], window=storm[1])
        self.backend_name = backend
        self.compile_seconds = 0.0
        # Eager steps live on the model and the optimizers themselves; nothing is lifted out.
        self._lifted = None if backend == "eager" else self._lift()
        self._versions = versions(_STACK[backend])
        self._stamp: Stamp | None = None
        self._known: dict[Any, Runner] = {}
        """Runners by the look of their batches, as long as the stamp is fresh."""

    def __call__(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Any:
        """Run one step, compiling first at a key not seen before; `sizes` names the batch's sizes for the reason."""
        return self.program(batch, sizes=sizes)(batch)

    def program(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Callable[[Any], Any]:
        """Return what runs a step on batches like `batch`: a Runner, or with the eager backend the step itself."""
        return self._run_eager if self._lifted is None else self.runner(batch, sizes=sizes).run

    def _run_eager(self, batch: Any) -> Any:
        if self._check_finite:
            check_finite(batch)
        arguments = (self._model, batch) if self._optimizer is None else (self._model, self._optimizer, batch)
        return pytree.tree_map_only(Tensor, Tensor.detach, self._step(*arguments))

    def runner(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Runner:
        """Return the Runner for batches like `batch`, compiled now unless there is one.

        Raises:
            CompileError: the step cannot be captured or lowered; model and optimizer are as they were.
        """
        self._storm.step()
        leaves, spec = take_apart(batch)
        look = (named_sizes(sizes), batch_info(leaves), self._around_key)
        if self._stamp is not None and self._stamp.fresh():
            runner = self._known.get(look)
            if runner is not None and runner.batch_spec == spec:
                return self._found(runner)
        else:
            self._known.clear()
            self._stamp = None
        lifted = self._lift_again_where_outdated()
        key = self.key(batch, sizes=sizes)
        try:
            runner = self._found(self._runners[key]) if key in self._runners else self._new(key, batch, lifted)
        except GradientsMatter as found:
            self._take_gradients(found)
            return self.runner(batch, sizes=sizes)
        if self._stamp is None:
            self._stamp = Stamp(lifted.state, self._model, self._reach)
        self._known[look] = runner
        return runner

    def _found(self, runner: Runner) -> Runner:
        self._runners.move_to_end(runner.key)
        self._last = runner.key
        return runner

    def _new(self, key: CompileKey, batch: Any, lifted: Lifted) -> Runner:
        self._spread.check({path: shape for path, shape, _ in key.batch})
        check_devices(batch, device_of(lifted.state.live()))
        why = reason_after(self._went_before, key) if self._last is None else reason(self._last, key)
        if self._on_start:
            self._on_start(why)
        started = time.perf_counter()
        made = self._obtain(key, batch, lifted)
        seconds = time.perf_counter() - started
        _, spec = take_apart(batch)
        again = self._capture_like(batch, lifted)
        runner = Runner(made, lifted, self._model, key, spec, again, self._with_gradients, self._spread, seconds)
        runner.check_finite = self._check_finite
        runner.given = 0 if self._around is None else self._around.given
        event = CompileEvent(
            name="compiled" if why == FIRST else "recompiled",
            reason=why,
            seconds=seconds,
            capture_seconds=made.capture_seconds,
            backend=lifted.backend.name,
            cache=made.cache,
            key=key.digest,
            nodes=made.kept.nodes,
            sizes=dict(key.sizes),
        )
        storm = self._storm.compiled(self._last, key)
        self._remember(key, runner)
        self.compile_seconds += seconds
        if self._on_event:
            self._on_event(event)
        if storm and self._on_warning:
            data = {"field": storm.field, "compiles": storm.compiles, "steps": storm.steps}
            self._on_warning(CompileWarning(name="recompile_storm", text=storm.text, data=data))
        return runner

    def _obtain(self, key: CompileKey, batch: Any, lifted: Lifted) -> Made:
        """Return a program from disk, or one compiled now and put there; one process at a time compiles a key."""
        if self._shipped is not None:
            found = self._shipped.take(key, lifted, self._reach.tensors)
            if isinstance(found, Made):
                return found
            self._say_not_used(found.why)
        if self._store is None:
            return self._compile(batch, lifted)
        made = self._from_disk(self._store, key, lifted)
        if made is not None:
            return made
        with self._store.lock(key.text):
            made = self._from_disk(self._store, key, lifted)  # whoever had the lock may have made it
            if made is None:
                try:
                    made = self._compile(batch, lifted)
                except GradientsMatter as found:
                    if found.always:  # the next process need not trace to find that out
                        self._store.put(key.text, {_GRADIENTS: json.dumps(sorted(found.exact)).encode()})
                    raise
                parts = lifted.backend.save(made.program) if made.kept.storable else None
                entry = None if parts is None else pack(made.kept, parts)
                if entry is not None:
                    self._store.put(key.text, entry)
        return made

    def _from_disk(self, store: ProgramStore, key: CompileKey, lifted: Lifted) -> Made | None:
        parts = store.get(key.text)
        if parts is None:
            return None
        if _GRADIENTS in parts:
            raise GradientsMatter(frozenset(json.loads(parts[_GRADIENTS])))
        try:
            found = unpack(parts, self._reach.tensors)
            if found is None:
                return None
            kept, backend_parts = found
            return Made(lifted.backend.load(backend_parts, kept.constants), kept, "disk")
        except Exception:  # whatever unpickling, a linker or XLA may raise: the entry is for another machine or version
            store.drop(key.text)
            return None

    def _compile(self, batch: Any, lifted: Lifted) -> Made:
        started = time.perf_counter()
        captured = self._capture(batch, lifted)
        seconds = time.perf_counter() - started
        kept = Kept.of(captured, self._reach.tensors)
        program = lifted.backend.lower(captured)
        return Made(program, kept, "backend" if program.from_cache else "none", captured, seconds)

    def _capture(self, batch: Any, lifted: Lifted, without: frozenset[str] = frozenset()) -> Captured:
        from twinstep.worker.compile.capture import (
            capture,  # late: a program from disk has no need of it, nor of passes
        )

        return capture(
            self._step,
            lifted.state,
            self._optimizer,
            batch,
            lifted.backend.decompositions(),
            backend=lifted.backend.name,
            strategies=self._strategies,
            without=without,
        )

    def _capture_like(self, batch: Any, lifted: Lifted) -> Capture:
        """Return what captures the step for batches like this one, without holding on to its values."""
        like = pytree.tree_map_only(Tensor, lambda leaf: torch.empty_like(leaf, device="meta"), batch)

        def again(without: frozenset[str] = frozenset()) -> Captured:
            here = device_of(lifted.state.live())
            there = torch.device("cpu") if here.type == "meta" else here
            zeros = pytree.tree_map_only(Tensor, lambda leaf: torch.zeros_like(leaf, device=there), like)
            return self._capture(zeros, lifted, without)

        return again

    def look(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Look:
        """Return the step captured for batches like `batch`, to be looked at; it is lowered only if that is asked for.

        Raises:
            CompileError: the step cannot be captured.
        """
        lifted = self._lift_again_where_outdated()
        key = self.key(batch, sizes=sizes)
        self._spread.check({path: shape for path, shape, _ in key.batch})
        try:
            captured = self._capture(batch, lifted)
        except GradientsMatter as found:
            self._take_gradients(found)
            return self.look(batch, sizes=sizes)
        again = self._capture_like(batch, lifted)
        return Look(
            key,
            captured,
            self._spread,
            again,
            lambda: self.runner(batch, sizes=sizes).program_text(),
        )

    def key(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> CompileKey:
        """Return the CompileKey of a step on `batch` as model and optimizers stand now."""
        state = self._need_lifted().state
        self._reach = reach(self._step, self._model, state)
        leaves, paths, spec = batch_leaves(batch)
        return CompileKey(
            sizes=named_sizes(sizes),
            devices=self._devices,
            mesh=self._spread.key,
            **standing(state, self._model),
            batch=tuple(tensor_info(path, leaf) for path, leaf in zip(paths, leaves, strict=True)),
            structure=str(spec),
            around=self._around_key,
            backend=self.backend_name,
            strategies=tuple(sorted(repr(each) for each in self._strategies.values())),
            step=self._reach.digest,
            threads=cpu_threads(),
            versions=self._versions,
        )

    def compiled_for(self) -> dict[str, Any]:
        """Return what the newest program was made for, as JSON has it, for `go_on_after`."""
        return dict(self._went_before) if self._last is None else told(self._last)

    def go_on_after(self, before: Mapping[str, Any]) -> None:
        """Give the reason of the first compile by what the program before it, of another process, was made for."""
        self._went_before = before

    @property
    def _around_key(self) -> KeyPart:
        return () if self._around is None else self._around.key

    def pull(self) -> None:
        """Bring the live model and optimizers up to date; with backends that work in place, nothing is to do."""
        if self._lifted is not None:
            self._lifted.backend.pull()

    def pull_own(self) -> RowsHeld:
        """Bring as much up to date as this process has to save; return who has which rows of what none has whole."""
        return {} if self._lifted is None else self._lifted.backend.pull_own()

    def pull_rest(self) -> RowsHeld:
        """As `pull_own`, but bring nothing of what no process has whole: `rows_here` gives rows of it."""
        return {} if self._lifted is None else self._lifted.backend.pull_rest()

    def rows_here(self, path: str, ids: Any) -> Any:
        """Return rows of a tensor that `pull_rest` named, [n, …]; zeros for those that other processes give."""
        return self._need_lifted().backend.rows_here(path, ids)

    def push(self) -> None:
        """Take the state from the live model and optimizers, whatever was written to them and how (`.data` too)."""
        if self._lifted is not None:
            self._lifted.backend.push()

    def random_state(self) -> Tensor:
        """Return where random numbers (dropout) stand, for a checkpoint: torch's generators, or XLA's key."""
        if self._lifted is not None:
            return self._lifted.backend.random_state()
        return torch_random_state(device_of([*self._model.parameters()]))

    def set_random_state(self, state: Tensor) -> None:
        """Go on from what `random_state` gave, of the same backend."""
        if self._lifted is not None:
            self._lifted.backend.set_random_state(state)
        else:
            set_torch_random_state(state, device_of([*self._model.parameters()]))

    def _lift_again_where_outdated(self) -> Lifted:
        """Return the lifted state, found anew after a parameter was frozen or a parameter group added.

        Programs made for the old slots go; those for other hyperparameters of the same slots stay.
        """
        lifted = self._need_lifted()
        if not lifted.state.outdated() and lifted.state.settings_changed():
            lifted.backend.pull()  # making state writes to parameters, what they hold now
            lifted.state.make_missing()
        return self._lift_again() if lifted.state.outdated() else lifted

    def _lift_again(self) -> Lifted:
        before = self._need_lifted()
        before.backend.pull()
        self._runners.clear()
        self._known.clear()
        self._stamp = None
        self._lifted = lifted = self._lift()
        lifted.backend.go_on_from(before.backend)
        return lifted

    def _take_gradients(self, found: GradientsMatter) -> None:
        """Make gradients part of the state, from now on for every program of this compiler."""
        self._gradients = (self._gradients or frozenset()) | found.exact
        self._lift_again()

    def _with_gradients(self, batch: Any) -> Runner:
        """Return the Runner for batches like `batch` that goes on from the gradients there are."""
        if self._gradients is None:
            self._take_gradients(GradientsMatter())
        return self.runner(batch)

    def _lift(self) -> Lifted:
        return Lifted.of(
            self._model,
            self._optimizer,
            self.backend_name,
            cache_dir=self._cache_dir,
            in_place=self._in_place,
            spread=self._spread,
            values=not self._ahead,
            gradients=self._gradients,
            around=self._around,
        )

    @property
    def reached(self) -> Mapping[str, Tensor]:
        """Tensors that the code of the step can reach, by path, as of the last key."""
        return self._reach.tensors

    @property
    def state(self) -> TrainState:
        """The state that was lifted out of model and optimizers."""
        return self._need_lifted().state

    def _need_lifted(self) -> Lifted:
        if self._lifted is None:
            raise CompileError("the eager backend compiles nothing", remedy="call the StepCompiler itself")
        return self._lifted

    def _remember(self, key: CompileKey, runner: Runner) -> None:
        self._runners[key] = runner
        self._last = key
        while len(self._runners) > self._max_runners:
            _, gone = self._runners.popitem(last=False)
            self._known = {look: each for look, each in self._known.items() if each is not gone}

    def _open_store(self, max_bytes: int) -> ProgramStore | None:
        if self._cache_dir is None:
            return None
        return ProgramStore(self._cache_dir / "programs", max_bytes=max_bytes, warn=self._cache_unusable)

    def _say_not_used(self, why: str) -> None:
        if why and self._on_warning and self._shipped is not None:
            text = f"no program compiled ahead for {self._shipped.target} is used: {why}; the step is compiled here"
            self._on_warning(CompileWarning(name="ahead_not_used", text=text, data={"why": why}))

    def _cache_unusable(self, problem: str) -> None:
        if self._on_warning:
            self._on_warning(CompileWarning(name="cache_unusable", text=f"{problem}; steps are compiled without it"))


def _ranks(backend: str) -> int:
    from twinstep.worker.compile.passes.communication import ranks  # late, as `capture`

    return ranks(backend)


def _check_around(around: Around | None, backend: str) -> None:
    if around is not None and backend != "xla":
        raise CompileError(f"no engine works within a step of the {backend} backend", remedy="set compile.backend: xla")


_GRADIENTS = "gradients"
"""The one part of an entry that says: the step wants slots for gradients, and there is no program without them."""
_STACK = {
    "inductor": ("torch",),
    "xla": ("torch", "torchax", "jax", "jaxlib", "jax-tpu-embedding"),
    "eager": ("torch",),
}
