"""One eager run and the candidates that are held to it, stepped together from copies of one state.

`run.py` tries compiled backends, `bisect.py` the same with a pass or a strategy switched off; both compare with what is
here, so a culprit is judged by the very measure that found the divergence.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from twinstep.worker.compile.parity.compare import EXACT, Difference, Kind, Tolerance, Tolerances, difference
from twinstep.worker.compile.parity.noise import GradientNoise, largest
from twinstep.worker.compile.parity.result import TensorReport
from twinstep.worker.compile.parity.watch import Gradients, wanted, watching
from twinstep.worker.compile.state import Optimizers, as_mapping
from twinstep.worker.compile.strategies import Strategy
from twinstep.worker.compile.structure import TrainStep

Between = Callable[[int, nn.Module, Any], None]
Name = tuple[Kind, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all runs of one comparison share."""

    train_step: TrainStep
    batches: Sequence[Any]
    steps: int
    table: Mapping[tuple[str, torch.dtype], Tolerances]
    gradients: Gradients
    strategies: Sequence[Strategy] = ()
    exclude: Mapping[str, str] = field(default_factory=dict)
    between: Between | None = None
    seed: int = 0
    narrow: torch.dtype | None = None
    """What the step computes in where that is narrower than its parameters (mixed precision)."""

    def batch(self, step: int) -> Any:
        """Return a copy of the batch of step number `step`, from 0: a step may write to its batch."""
        return pytree.tree_map_only(Tensor, Tensor.clone, self.batches[step % len(self.batches)])

    def begin(self, step: int, model: nn.Module, optimizer: Optimizers) -> None:
        """Do what stands before a step of any run: the schedule, and the seed of its random numbers."""
        if self.between is not None:
            self.between(step, model, optimizer)
        torch.manual_seed(self.seed + step)

    def tolerance(self, backend: str, kind: Kind, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of one tensor; with mixed precision, that of the narrow dtype for all floats."""
        if not dtype.is_floating_point:
            return EXACT
        row = self.table.get((backend, self.narrow or dtype))
        return EXACT if row is None else row[kind]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is compared after a step."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


class Candidate(Protocol):
    """What is held to eager."""

    backend: str

    def advance(self, step: int) -> Snapshot: ...


class Eager:
    """The reference: the user's step as PyTorch runs it, on copies of model and optimizers."""

    def __init__(self, settings: Settings, model: nn.Module, optimizer: Optimizers) -> None:
        self.settings = settings
        self.model, self.optimizer = copy.deepcopy((model, optimizer))
        self._step = watching(settings.train_step, "all")  # noise is judged by all of them
        dtype = settings.narrow or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.noise = GradientNoise(eps=torch.finfo(dtype).eps)

    def advance(self, step: int) -> Snapshot:
        """Take step number `step`, from 0."""
        before = {path: tensor.detach().clone() for path, tensor in state_of(self.model, self.optimizer).items()}
        self.settings.begin(step, self.model, self.optimizer)
        result, gradients = self._step(*arguments(self.model, self.optimizer, self.settings.batch(step)))
        state = state_of(self.model, self.optimizer)
        self.noise.add_step(gradients, before, state, _owners(self.model, self.optimizer))
        chosen = {name: each for name, each in gradients.items() if wanted(name, self.settings.gradients)}
        return Snapshot(named_outputs(result), chosen, state)


def arguments(model: nn.Module, optimizer: Optimizers, batch: Any) -> tuple[Any, ...]:
    """Return what a train step is called with."""
    return (model, batch) if optimizer is None else (model, optimizer, batch)


class Ledger:
    """Differences of one candidate, tensor by tensor and step by step."""

    def __init__(self, settings: Settings, backend: str) -> None:
        self._settings, self._backend = settings, backend
        self._steps: dict[Name, list[Difference]] = {}
        self._facts: dict[Name, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._scales: dict[Name, float] = {}
        self.diverged = False

    def add(self, got: Snapshot, want: Snapshot, noise: GradientNoise) -> None:
        """Compare what one step left behind."""
        for kind, name, wanted_tensor in _everything(want):
            found = _look_up(got, kind, name)
            key, dtype = (kind, name), wanted_tensor.dtype
            tolerance = self._settings.tolerance(self._backend, kind, dtype)
            if kind == "gradient":
                tolerance = Tolerance(tolerance.relative, tolerance.absolute + noise.floor)
            if found is None:
                result = Difference(torch.inf, torch.inf, torch.inf, 0, (), "not there")
            else:
                allowance = noise.allowance(f"{kind}:{name}", wanted_tensor)
                result = difference(
                    found,
                    wanted_tensor,
                    tolerance,
                    elementwise=kind == "loss",
                    at_least=self._scale(key, wanted_tensor),
                    allowance=allowance,
                )
            self._facts[key] = dtype, tuple(wanted_tensor.shape)
            self._steps.setdefault(key, []).append(result)
            self.diverged |= result.over and not self._excluded(kind, name)

    def _scale(self, key: Name, want: Tensor) -> float:
        """Return the largest |value| of a gradient or a tensor of the state so far; 0 for outputs."""
        if key[0] in ("loss", "output") or not want.numel():
            return 0.0
        self._scales[key] = max(self._scales.get(key, 0.0), largest((want,)))
        return self._scales[key]

    def reports(self, order: Mapping[Name, int]) -> tuple[TensorReport, ...]:
        """Return the tensors in the order the graph computes them; what the graph does not know stands last."""
        return tuple(
            TensorReport(
                kind=kind,
                name=name,
                dtype=str(self._facts[kind, name][0]).removeprefix("torch."),
                shape=self._facts[kind, name][1],
                tolerance=self._settings.tolerance(self._backend, kind, self._facts[kind, name][0]),
                steps=tuple(self._steps[kind, name]),
                excluded=self._excluded(kind, name),
            )
            for kind, name in sorted(self._steps, key=lambda key: order.get(key, len(order) + 10**9))
        )

    def _excluded(self, kind: Kind, name: str) -> str:
        for pattern, reason in self._settings.exclude.items():
            if fnmatch.fnmatchcase(f"{kind}:{name}", pattern):
                return reason
        return ""


def _everything(snapshot: Snapshot) -> list[tuple[Kind, str, Tensor]]:
    found: list[tuple[Kind, str, Tensor]] = [
        (output_kind(path, tensor, sole=len(snapshot.outputs) == 1), path, tensor)
        for path, tensor in snapshot.outputs.items()
    ]
    found += [("gradient", name, tensor) for name, tensor in snapshot.gradients.items()]
    for path, tensor in snapshot.state.items():
        role, _, name = path.partition(":")
        found.append((role, name, tensor))  # type: ignore[arg-type]
    return found


def _look_up(snapshot: Snapshot, kind: Kind, name: str) -> Tensor | None:
    if kind in ("loss", "output"):
        return snapshot.outputs.get(name)
    return snapshot.gradients.get(name) if kind == "gradient" else snapshot.state.get(f"{kind}:{name}")


def output_kind(path: str, tensor: Tensor, *, sole: bool) -> Kind:
    """Return what an output is: a loss if its path says so, or if it is the only output and a scalar."""
    is_loss = "loss" in path.lower() or (sole and tensor.dim() == 0)
    return "loss" if is_loss and tensor.is_floating_point() else "output"


def named_outputs(result: Any) -> dict[str, Any]:
    """Return the tensors (or whatever leaves there are, but None and texts) of a step's result by their paths."""
    with_paths, _ = pytree.tree_flatten_with_path(result)
    return {
        ".".join(_part(key) for key in path) or "output": leaf.detach() if isinstance(leaf, Tensor) else leaf
        for path, leaf in with_paths
        if isinstance(leaf, Tensor | int) and not isinstance(leaf, bool)
    }


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def state_of(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizers' tensors by the paths that the compiler's slots have."""
    found = {f"parameter:{name}": parameter.detach() for name, parameter in model.named_parameters()}
    found |= {f"buffer:{name}": buffer.detach() for name, buffer in model.named_buffers()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for key, each in as_mapping(optimizer).items():
        for parameter, entries in each.state.items():
            for entry in sorted(entries):
                if isinstance(entries[entry], Tensor):
                    found[f"optimizer:{key}/{entry}/{names[id(parameter)]}"] = entries[entry].detach()
    return found


def _owners(model: nn.Module, optimizer: Optimizers) -> dict[str, tuple[str, str]]:
    """Return, for each parameter an optimizer holds and each of its tensors, the group and the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for key, each in as_mapping(optimizer).items():
        for group in each.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                found[f"parameter:{name}"] = (key, name)
                for entry in each.state.get(parameter, {}):
                    found[f"optimizer:{key}/{entry}/{name}"] = (f"{key}/{entry}", name)
    return found
