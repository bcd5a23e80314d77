"""What a run's state is made of: tensors by logical name, out of a live model and its optimizers and back into them.

Names are those the compiler gives its slots (`parameter:layers.0.weight`, `optimizer:dense/exp_avg/layers.0.weight`),
so that every backend reads what any other wrote; a backend that holds the state elsewhere is asked to `pull` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.errors import Fault
from twinstep.worker.checkpoint.errors import MisfitError
from twinstep.worker.checkpoint.manifest import Manifest, Part
from twinstep.worker.checkpoint.shares import Rows, Share
from twinstep.worker.compile.state import Slot, materialise
from twinstep.worker.embedding.declared import declared

RANDOM = "random:"
"""Beginning of the path of a random generator's state."""


def live_tensors(
    model: nn.Module, optimizers: Mapping[str, Optimizer], *, gradients: bool = False
) -> dict[str, Tensor]:
    """Return the live tensors by path: parameters (tied ones once), buffers, what optimizers keep of each parameter.

    Args:
        gradients: also each `.grad` there is, for a step that adds up gradients over several calls.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {Slot("parameter", name).path: each for name, each in model.named_parameters()}
    found |= {Slot("buffer", name).path: each for name, each in model.named_buffers()}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for entry, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        found[Slot("optimizer", f"{key}/{entry}/{names[id(parameter)]}").path] = value
    if gradients:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[Slot("gradient", f"gradient/{name}").path] = parameter.grad
    return found


def check_fits(manifest: Manifest, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Hold a checkpoint against the model and optimizers that are to take it up; makes state optimizers make lazily.

    Raises:
        MisfitError: a tensor is missing, left over, or of another shape or dtype; each is named in `faults`. Neither
            parameters nor state have changed.
    """
    for key, optimizer in optimizers.items():
        materialise(key, optimizer)
    live, there = live_tensors(model, optimizers), _of_state(manifest)
    faults = [fault for path in {**live, **there} if (fault := _fault(path, live, manifest)) is not None]
    if not faults:
        return
    others = f", and {len(faults) - 1} more tensors" if len(faults) > 1 else ""
    raise MisfitError(
        f"the checkpoint of step {manifest.step} is of another model or other optimizers than the spec: "
        f"{faults[0].field} {faults[0].problem}{others}",
        remedy="undo the change of the spec, or give another checkpoint.path to start anew",
        faults=tuple(faults),
    )


def _of_state(manifest: Manifest) -> dict[str, None]:
    return {path: None for path in manifest.tensors if not path.startswith((RANDOM, "gradient:"))}


def _fault(path: str, live: Mapping[str, Tensor], manifest: Manifest) -> Fault | None:
    entry, tensor = manifest.tensors.get(path), live.get(path)
    if entry is None:
        # An optimizer keeps nothing of a parameter that it has not stepped yet.
        if path.startswith("optimizer:") and not _steps_of(path, manifest):
            return None
        return Fault(field=path, problem="is not in the checkpoint", remedy="a spec without it")
    if tensor is None:
        return Fault(field=path, problem="is in the checkpoint alone", remedy="a spec with it")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) == entry.shape and dtype == entry.dtype:
        return None
    return Fault(
        field=path,
        problem=f"is {list(tensor.shape)} {dtype}, in the checkpoint {list(entry.shape)} {entry.dtype}",
        given=f"{list(tensor.shape)} {dtype}",
        allowed=f"{list(entry.shape)} {entry.dtype}",
    )


def _steps_of(path: str, manifest: Manifest) -> bool:
    """Say whether the checkpoint has anything that the optimizer of `path` keeps of the same parameter."""
    key, _, parameter = path.removeprefix("optimizer:").split("/", 2)
    return any(other.startswith(f"optimizer:{key}/") and other.endswith(f"/{parameter}") for other in manifest.tensors)


def load_tensors(values: Mapping[str, Tensor], model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Copy values into the live tensors of a model that `check_fits` took; each `.grad` becomes what was saved."""
    live = live_tensors(model, optimizers)
    with torch.no_grad():
        for path, tensor in live.items():
            if path in values:
                tensor.copy_(values[path])
                if (known := declared(tensor)) is not None:
                    known.is_whole()
        for name, parameter in model.named_parameters():
            saved = values.get(Slot("gradient", f"gradient/{name}").path)
            parameter.grad = None if saved is None else saved.to(parameter.device).clone()


class Snapshot:
    """A copy of a run's tensors in memory, in buffers that are kept from one to the next."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """By path; contiguous, on the CPU. Of whole tensors; `parts` are all there are."""
        self.parts: list[Part] = []
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], share: Share | None = None) -> None:
        """Copy `tensors`, or of them the rows of a share; this is all of a checkpoint that a run waits for."""
        self._buffers = {(path, 0): tensor for path, tensor in self.tensors.items()} | {
            (part.path, part.start): part.rows for part in self.parts
        }
        self.parts = [
            Part(path, tuple(tensor.shape), start, self._kept(path, tensor, start, rows))
            for path, tensor in tensors.items()
            for start, rows in _rows_of(tensor.detach(), None if share is None else share.get(path, []))
        ]
        self._buffers = {}
        self.tensors = {part.path: part.rows for part in self.parts if part.rows.shape == part.shape}

    def _kept(self, path: str, tensor: Tensor, start: int, rows: Tensor) -> Tensor:
        """Return a copy of rows of a tensor; of a declared one those that were brought to be saved, as they are."""
        known = declared(tensor)
        room = None if known is None else known.saved(start, start + len(rows))
        return self._copied((path, start), rows) if room is None else room

    def _copied(self, key: tuple[str, int], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return buffer.copy_(tensor)

    def not_finite(self) -> str | None:
        """Return the path of a parameter, or of optimizer state, with a NaN or infinity in it; None: there is none."""
        for part in self.parts:
            path, tensor = part.path, part.rows
            floats = tensor.is_floating_point() and path.startswith(("parameter:", "optimizer:"))
            # The sum is cheap and NaN spreads through it; only where it is not finite are elements looked at.
            if floats and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                return path
        return None


def _rows_of(tensor: Tensor, wanted: Sequence[Rows] | None) -> Iterator[tuple[int, Tensor]]:
    if wanted is None or not tensor.dim():
        if wanted is None or wanted:
            yield 0, tensor
        return
    for start, stop in wanted:
        yield start, tensor[start:stop]
