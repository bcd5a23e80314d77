"""Stage 5, lower with XLA: the captured ATen graph runs as JAX through torchax, under one jit with its state donated.

State lives in JAX arrays between steps; `pull` copies it into the live module and optimizers, and a live tensor that
someone wrote to since (a checkpoint load, say) is picked up before the next step. How a graph becomes JAX is
`xla_trace.py`'s, which a program from disk has no need of.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from torch import Tensor

from twinstep.spec.errors import CompileError, TwinstepError
from twinstep.spec.machine import has_tpu_chips
from twinstep.worker.compile.accumulation import Left
from twinstep.worker.compile.annotate import Spread
from twinstep.worker.compile.around import Around
from twinstep.worker.compile.lower import xla_attention_cpu, xla_rows_cpu
from twinstep.worker.compile.lower.layout import Layout, Specs, own_rows, rows_held, rows_here
from twinstep.worker.compile.lower.loading import loading
from twinstep.worker.compile.lower.memory import give_back, keep_freed_memory
from twinstep.worker.compile.lower.xla_around import with_around
from twinstep.worker.compile.lower.xla_values import host_values, to_jax, to_torch
from twinstep.worker.compile.program import Collect, RowsHeld
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.up_to_date import keep_up_to_date, let_go
from twinstep.worker.embedding.declared import Declared, declared
from twinstep.worker.ops.rows import UNIQUE_ROWS

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured


def _tracing() -> ModuleType:
    """Return the half that traces, with torchax: half a second to import, of which a program from disk needs nothing.

    Raises:
        CompileError: a package of it does not load.
    """
    with loading("xla"):
        return importlib.import_module("twinstep.worker.compile.lower.xla_trace")


def leave_out_absent_tpus() -> None:
    """Let JAX ask only the CPU where nothing else can be: libtpu, asked without chips, prints a page of errors.

    What the environment names is left as it is, and so is a JAX that has a GPU's plugin, or has its devices already.
    """
    others = importlib.util.find_spec("jax_plugins") is not None
    if not getattr(jax.config, "jax_platforms", None) and not others and not has_tpu_chips():
        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]


class XlaBackend:
    """Lowers captured steps and holds the state they share, on JAX's default device."""

    name = "xla"
    wraps_indices = True

    def __init__(
        self,
        state: TrainState,
        *,
        cache_dir: Path | None,
        in_place: bool = True,
        spread: Spread | None = None,
        around: Around | None = None,
    ) -> None:
        leave_out_absent_tpus()
        # Before the first array is made: that starts XLA's threads.
        if getattr(jax.config, "jax_platforms", None) == "cpu":
            keep_freed_memory(large=True)
        self._live = state
        self.layout = Layout(spread or Spread())
        self._in_place = in_place
        self.around = around
        """What an embedding engine does within every program."""
        self.arrays: list[jax.Array] = []
        self._seen: list[tuple[Tensor, int]] = []
        """The live tensors and their versions at the last push or pull: the tensors themselves, since an address or an
        id may be another tensor's by now."""
        self.key = jax.random.key(torch.initial_seed() % (1 << 63))
        self._cache_dir = cache_dir
        self.ahead = False
        """Whether steps have run since the last push or pull."""
        self.devices_alone_know: list[Declared] = []
        """Declared tensors that live here, whose rows come from nowhere else once a step has run."""
        self.holds = False
        """Whether `state_dict()` asks this one, and no other compiler over the same model."""

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return what a captured step is made of."""
        found: dict[Any, Callable[..., Any]] = _tracing().decompositions()
        return found

    def lower(self, captured: Captured) -> XlaProgram:
        """Compile `captured`.

        Raises:
            CompileError: an op has no lowering, or XLA refuses the program.
        """
        layout, tracing = self.layout, _tracing()
        batch_specs = layout.learn(captured)
        if not self.arrays:
            self._place_first()
        constants = [layout.everywhere(to_jax(tensor)) for tensor in captured.constants]
        rates = [layout.everywhere(jnp.float32(0))] * captured.num_rates
        start = captured.num_state + captured.num_rates
        given = 0 if self.around is None else self.around.given
        batch_specs = batch_specs[: len(batch_specs) - given]
        batch = layout.put(map(to_jax, captured.example[start : start + captured.num_batch - given]), batch_specs)
        self.key = layout.everywhere(self.key)
        function, placing = tracing.as_jax(captured, layout.hidden(captured), layout.ring(captured)), layout.results()
        more: tuple[Any, ...] = ()
        if self.around is not None:
            function, more = with_around(function, self.around), (self.around.state, self.around.arguments)
            placing = (*(placing or (None, None, None)), self.around.placing, None)
        # On the CPU an executable that JAX took from its own cache cannot be written out again: it has lost its code.
        cache_dir = None if jax.default_backend() == "cpu" else self._cache_dir
        before = _cache_entries(cache_dir)
        try:
            with _cache_at(cache_dir), warnings.catch_warnings(), xla_rows_cpu.on_one_cpu(self._on_one_cpu):
                warnings.filterwarnings("ignore", "Explicitly requested dtype")  # 64-bit: checked in to_jax
                lowered = jax.jit(
                    function,
                    donate_argnums=((0, 5) if more else 0) if self._in_place else (),
                    out_shardings=placing,
                ).lower(self.arrays, rates, batch, constants, self.key, *more)
                compiled = lowered.compile(tracing.compiler_options(captured))
        except CompileError:
            raise
        except Exception as error:  # torchax and JAX raise whatever an op's own code raises
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise CompileError(
                f"XLA cannot lower the step: {type(error).__name__}: {line}",
                remedy="set compile.backend: inductor, or eager",
            ) from error
        cached = cache_dir is not None and _cache_entries(cache_dir) == before and before > 0
        give_back()
        return XlaProgram(
            self,
            compiled,
            tracing.result_dtypes(captured),
            captured.constants,
            batch_specs,
            from_cache=cached,
            attention=tracing.attention_widths(captured.graph),
            rows=self._on_one_cpu and bool(captured.graph.graph.find_nodes(op="call_function", target=UNIQUE_ROWS)),
        )

    @property
    def _on_one_cpu(self) -> bool:
        devices = self.layout.devices()
        return len(devices) == 1 and devices[0].platform == "cpu"

    def save(self, program: XlaProgram) -> dict[str, bytes] | None:
        """Return the parts `load` makes the program of in another process; None: this XLA cannot write it out."""
        if program.from_cache:
            return None
        places = (self.layout.state, self.layout.extra, program.batch_specs, self.layout.lines)
        try:
            parts = parts_of(program.compiled, program.dtypes, places, program.attention)
            return parts | {"rows": json.dumps(program.rows).encode()}
        except Exception:  # XLA's own errors, by backend; the step is compiled again then
            return None

    def load(self, parts: Mapping[str, bytes], constants: Sequence[Tensor]) -> XlaProgram:
        """Return the program that `save` made parts of; raises whatever a damaged one, or another machine, does."""
        attention = json.loads(parts["attention"])
        for widths in attention:
            if not xla_attention_cpu.register(*widths):
                raise CompileError("no kernel for this program's attention", remedy="it is compiled again")
        rows = bool(json.loads(parts.get("rows", b"false")))  # what was made for a TPU has none
        if rows and not xla_rows_cpu.register():
            raise CompileError("no kernels for this program's tables", remedy="it is compiled again")
        content, taken, given = pickle.loads(parts["executable"])  # noqa: S301  the store has checked owner and sums
        compiled = serialize_executable.deserialize_and_load(
            content, taken, given, execution_devices=self.layout.devices()
        )
        dtypes = pickle.loads(parts["dtypes"])  # noqa: S301
        state_specs, extra, batch_specs, in_lines = pickle.loads(parts["layout"])  # noqa: S301
        self.layout.take(state_specs, extra, in_lines)
        if not self.arrays:
            self._place_first()
        self.key = self.layout.everywhere(self.key)
        return XlaProgram(
            self, compiled, dtypes, constants, batch_specs, from_cache=True, attention=attention, rows=rows
        )

    def push(self) -> None:
        """Bring everything from the live tensors to the device, or devices once it is known which goes where."""
        if self.around is not None:
            self.around.push()
        if self.layout.known:
            self._place()

    def _place_first(self) -> None:
        """Bring the state to where the first program wants it; an engine may have its own there already."""
        if self.around is not None:
            self.around.push_written()
        self._place()

    def _place(self) -> None:
        live = self._live.live()
        self.arrays = [self._held(slot, tensor) for slot, tensor in enumerate(live)]
        self.devices_alone_know = [found for tensor in live if (found := declared(tensor)) is not None]
        self._note()

    def _held(self, slot: int, tensor: Tensor) -> jax.Array:
        """Bring one tensor of the state to where it lives; of one that is split, no more than rows of here is read."""
        known = declared(tensor)
        if self.layout.splits(slot):
            rows = known.rows if known is not None else lambda start, stop: tensor[start:stop]
            return self.layout.hold_rows(slot, tuple(tensor.shape), lambda start, stop: host_values(rows(start, stop)))
        (array,) = self.layout.hold([to_jax(tensor if known is None else known.rows(0, len(tensor)))], slot)
        return array

    def leave_gradients(self, left: Left) -> None:
        """Set which `.grad` are None after a step; their numbers are here until a pull."""
        gradients = self._live.gradients
        if gradients is not None:
            gradients.leave(left)
            start = len(self._seen) - len(left)
            self._seen[start:] = [(tensor, tensor._version) for tensor in gradients.live()]

    def value(self, slot: int) -> Tensor:
        """Return a tensor of the state as the last step left it, or as it was written since."""
        if not self.arrays:
            return self._live.live()[slot].detach()
        self.check_state()
        self.push_written()
        tensor = self._live.live()[slot]
        return (
            to_torch(self.layout.whole(self.arrays[slot]), tensor.dtype)[: len(tensor)]
            if tensor.dim()
            else (to_torch(self.layout.whole(self.arrays[slot]), tensor.dtype))
        )

    def take_up(self) -> None:
        """Become the holder of the state of model and optimizers: another brings back what it has."""
        if not self.holds:
            let_go(self._live.model, self._live.optimizers.values())
            keep_up_to_date(self._live.model, self._live.optimizers.values(), self)
            self.holds = True

    def random_state(self) -> Tensor:
        """Return the random key's two numbers, int64 [2]."""
        return torch.from_numpy(np.asarray(jax.random.key_data(self.key)).astype(np.int64))

    def set_random_state(self, state: Tensor) -> None:
        """Set the random key."""
        self.key = self.layout.everywhere(jax.random.wrap_key_data(jnp.asarray(state.numpy().astype(np.uint32))))

    def go_on_from(self, before: XlaBackend) -> None:
        """Take over the random key of the backend that held the state before, or its numbers would come again."""
        self.key = before.key

    def push_written(self) -> None:
        """Bring to the device what was written to, or replaced, since the last push or pull."""
        for index, (tensor, (seen, version)) in enumerate(zip(self._live.live(), self._seen, strict=True)):
            if tensor is not seen or tensor._version != version:
                self.arrays[index] = self._held(index, tensor)
                self._seen[index] = (tensor, tensor._version)
        if self.around is not None:
            self.around.push_written()

    def pull(self) -> None:
        """Copy the device's state into the live module and optimizers.

        Raises:
            CompileError: a step failed while it ran and took the state with it.
        """
        self._bring("whole")

    def pull_own(self) -> RowsHeld:
        """Copy this process's rows of tensors that are split over processes, and all others whole; as `pull` else."""
        return self._bring("own")

    def pull_rest(self) -> RowsHeld:
        """As `pull_own`, but nothing of tensors that are split over processes: `rows_here` gives rows of them."""
        return self._bring("rest")

    def rows_here(self, path: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return rows of a tensor that `pull_rest` named, zeros for those that other processes give."""
        slot = [each.path for each in self._live.slots].index(path)
        return rows_here(self.arrays[slot], len(self._live.live()[slot]), ids)

    def _bring(self, what: Literal["whole", "own", "rest"]) -> RowsHeld:
        held: RowsHeld = {}
        if not (self.arrays and self.ahead):
            if what != "rest":
                for tensor in self._live.live():
                    if (known := declared(tensor)) is not None:
                        known.fill()
            return held
        self.check_state()
        if not self._live.outdated():
            self.push_written()
        live = self._live.live_by_path()
        with torch.no_grad():
            for index, (slot, array) in enumerate(zip(self._live.slots, self.arrays, strict=True)):
                if slot.path not in live:  # an optimizer's state may have been cleared since
                    continue
                tensor = live[slot.path].detach()
                rows = rows_held(array, len(tensor)) if what != "whole" and tensor.dim() else None
                if rows is not None:
                    held[slot.path] = rows
                    if what == "rest":
                        continue
                    known = declared(live[slot.path])
                    for start, stop, part in own_rows(array, len(tensor)):
                        place = tensor[start:stop] if known is None else known.room(start, stop)
                        place.copy_(to_torch(part, tensor.dtype)[: stop - start])
                    continue
                values = to_torch(self.layout.whole(array), tensor.dtype)
                tensor.copy_(values[: len(tensor)] if self.layout.padded(index) else values)
                if (known := declared(live[slot.path])) is not None:
                    known.is_whole()
        if self.around is not None:
            {"whole": self.around.pull, "own": self.around.pull_own, "rest": self.around.settle}[what]()
        self._note()
        # Of those, other processes' rows are not here yet.
        self.ahead = bool(held) or (what != "whole" and self.around is not None)
        return held

    def check_state(self) -> None:
        """Raise CompileError if the device's state is gone: reusing a donated buffer crashes the process."""
        if any(array.is_deleted() for array in self.arrays):
            raise CompileError(
                "the state on the device went with a step that failed while it ran",
                remedy="call push() to go on from the live model (its state of the last pull), or load a checkpoint",
            )

    def _note(self) -> None:
        self.ahead = False
        self._seen = [(tensor, tensor._version) for tensor in self._live.live()]


class XlaProgram:
    """A compiled step over the backend's arrays."""

    def __init__(
        self,
        backend: XlaBackend,
        compiled: Any,
        dtypes: list[torch.dtype],
        constants: Sequence[Tensor],
        batch_specs: Specs,
        *,
        from_cache: bool,
        attention: list[list[int]],
        rows: bool = False,
    ) -> None:
        self.compiled = compiled
        self.batch_specs = batch_specs
        self.dtypes = dtypes
        self.from_cache = from_cache
        self.attention = attention
        """Head widths of the attention kernels that the program calls: they must be registered before it is loaded."""
        self.rows = rows
        """Whether it calls the kernels for rows of tables: so must they."""
        self._backend = backend
        self._constants = constants
        self._versions: list[int] = []
        self._constant_arrays: list[jax.Array] = []

    def text(self) -> str:
        """Return the optimized HLO."""
        return str(self.compiled.as_text())

    def start(self, rates: Sequence[Tensor], batch: Sequence[Tensor]) -> Collect:
        """Start one step, which replaces the device's state; nothing waits for the device until outputs are wanted.

        Raises:
            DataError: an integer of the batch does not fit the 32 bits XLA programs hold it in.
        """
        backend = self._backend
        backend.check_state()
        backend.take_up()
        backend.push_written()
        while backend.devices_alone_know:
            backend.devices_alone_know.pop().source = None
        backend.ahead = True
        layout = backend.layout
        rate_arrays = [layout.everywhere(jnp.float32(rate.item())) for rate in rates]
        batch_arrays = layout.put(map(to_jax, batch), self.batch_specs)
        arguments = (backend.arrays, rate_arrays, batch_arrays, self._constants_now(), backend.key)
        around = backend.around
        if around is None:
            backend.arrays, outputs, backend.key = self.compiled(*arguments)
        else:
            backend.arrays, outputs, backend.key, *theirs = self.compiled(*arguments, around.state, around.arguments)
            around.took(*theirs)

        def collect() -> list[Tensor]:
            try:
                found = [to_torch(array, dtype) for array, dtype in zip(outputs, self.dtypes, strict=False)]
                if around is not None:
                    around.check()
                return found + [torch.empty(0)] * (len(self.dtypes) - len(found))
            except TwinstepError:  # what was found wrong, after a step that ended
                raise
            except Exception:  # on the device, after the old state was given away: check_state says so from now on
                for array in backend.arrays:
                    array.delete()
                raise

        return collect

    def _constants_now(self) -> list[jax.Array]:
        """Return the constants on the device, brought there again where one was written to since."""
        versions = [each._version for each in self._constants]
        if versions != self._versions:
            everywhere = self._backend.layout.everywhere
            self._constant_arrays, self._versions = [everywhere(to_jax(each)) for each in self._constants], versions
        return self._constant_arrays


def parts_of(
    compiled: Any,
    dtypes: list[torch.dtype],
    places: tuple[Specs, tuple[int, ...], Specs, tuple[bool, ...]],
    attention: list[list[int]],
) -> dict[str, bytes]:
    """Return what `XlaBackend.load` makes a program of.

    Args:
        places: where state lives, rows added to it, where batch leaves live, whose rows lie in lines.
        attention: head widths of the CPU kernels that it calls.
    """
    return {
        # Bytes of the executable, and the structure of what goes in and comes out.
        "executable": pickle.dumps(serialize_executable.serialize(compiled)),
        "dtypes": pickle.dumps(dtypes),
        "layout": pickle.dumps(places),
        "attention": json.dumps(attention).encode(),
    }


class _cache_at:
    """Let JAX keep compiled programs in a directory, for the length of a block."""

    def __init__(self, directory: Path | None) -> None:
        self._wanted: dict[str, Any] = (
            {"jax_enable_compilation_cache": False}
            if directory is None
            else {
                "jax_enable_compilation_cache": True,
                "jax_compilation_cache_dir": str(directory),
                "jax_persistent_cache_min_compile_time_secs": 0.0,
                "jax_persistent_cache_min_entry_size_bytes": -1,
            }
        )
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._before = {name: getattr(jax.config, name) for name in self._wanted}
        if self._wanted.get("jax_compilation_cache_dir") != self._before.get("jax_compilation_cache_dir"):
            compilation_cache.reset_cache()  # JAX opens its cache once, and would stay with another directory
        for name, value in self._wanted.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _cache_entries(directory: Path | None) -> int:
    return sum(1 for _ in directory.glob("jit_step-*-cache")) if directory and directory.is_dir() else 0
