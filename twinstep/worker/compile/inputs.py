"""What is refused before anything is changed: pieces that are not what a step is made of, devices, NaN in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from twinstep.spec.errors import CompileError, DataError


def check_backend(backend: str, known: Sequence[str]) -> None:
    """Check the name of a backend.

    Raises:
        CompileError: it is none of `known`.
    """
    if backend not in known:
        means = _MEANS.get(str(backend).lower())
        hint = f"{means}; " if means else ""
        raise CompileError(f"no backend is called {backend!r}", remedy=f"{hint}use {', '.join(known)}")


_MEANS = {
    "gpu": "for a GPU: inductor, with the model on the device",
    "cuda": "for a GPU: inductor, with the model on the device",
    "tpu": "for a TPU: xla; to compile for one that is not here: twinstep.compile_ahead",
    "jax": "JAX is how xla runs",
    "torchax": "torchax is how xla runs",
}


def check_pieces(model: Any, optimizer: Any, backend: str, *, values: bool = True) -> None:
    """Check model and optimizer before either is looked into; without `values`, shapes on the meta device will do.

    Raises:
        CompileError: they are not what a step is made of, or hold parameters without shape or values.
    """
    if not isinstance(model, nn.Module):
        raise CompileError(
            f"the model is {_kind(model)}, no nn.Module", remedy="compile(train_step, model, optimizer, …)"
        )
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    for key, each in optimizers.items():
        if each is not None and not isinstance(each, Optimizer):
            raise CompileError(
                f"optimizer {key!r} is {_kind(each)}, no torch.optim.Optimizer",
                remedy="give an optimizer, a mapping of some by name, or None",
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CompileError(
                f"{name} has no shape yet", remedy="run the module on a batch once, before the optimizer is made"
            )
    if values or not all(each.is_meta for each in model.parameters()):
        _check_devices(model, [each for each in optimizers.values() if each is not None], backend)


def _check_devices(model: nn.Module, optimizers: Sequence[Optimizer], backend: str) -> None:
    """Check that all state is on one device, with values, where the backend reads it."""
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(parameter): name for name, parameter in named.items()}
    for each in optimizers:
        for parameter, entries in each.state.items():
            for entry, value in entries.items():
                if isinstance(value, Tensor) and value.dim():  # a step count may stay on the host
                    named[f"{entry} of {names.get(id(parameter), 'a parameter')}"] = value
    first = next(iter(named.values()), None)
    for name, tensor in named.items():
        if tensor.is_meta:
            raise CompileError(
                f"{name} is on the meta device and has no values",
                remedy="fill the model first: model.to_empty(device='cpu'), then its initialisation",
            )
        if backend == "xla" and tensor.device.type != "cpu":
            raise CompileError(
                f"{name} is on {tensor.device}; with xla the live model stays on the host",
                remedy="model.cpu() before the optimizer is made: the program's own state is on JAX's device",
            )
        if first is not None and tensor.device != first.device:
            raise CompileError(
                f"{name} is on {tensor.device}, the model's first tensor on {first.device}",
                remedy="move the whole model to one device before the optimizer is made",
            )


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of a state; the host where there is none."""
    return tensors[0].device if tensors else torch.device("cpu")


def is_plain(leaf: Tensor, device: torch.device) -> bool:
    """Say whether a batch's tensor is a plain array on `device`: what is asked at each step, and so is quick."""
    return leaf.device == device and leaf.layout is torch.strided


def check_leaf(name: str, leaf: Tensor) -> None:
    """Check that a batch's tensor is a plain array.

    Raises:
        CompileError: it is sparse, nested or quantized.
    """
    kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout).removeprefix("torch.")
    if kind != "strided":
        raise CompileError(
            f"batch leaf {name} is a {kind} tensor", remedy="give a dense one: padded, with a mask of what is there"
        )


def check_devices(batch: Any, device: torch.device) -> None:
    """Check that a batch's tensors are where the state is.

    Raises:
        CompileError: one is not.
    """
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.device != device:
            raise CompileError(
                f"batch leaf {_name(path)} is on {leaf.device}, the model on {device}",
                remedy=f"batch.to({str(device)!r})",
            )


def check_finite(batch: Any) -> None:
    """Check the numbers of a batch, which reads all of them.

    Raises:
        DataError: a leaf holds NaN or an infinity; it is named, with the place of the first.
    """
    with_paths, _ = pytree.tree_flatten_with_path(batch)
    for path, leaf in with_paths:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            at = (~torch.isfinite(leaf)).nonzero()[0].tolist()
            raise DataError(
                f"batch leaf {_name(path)} holds {leaf[tuple(at)].item()} at {at}; nothing was changed",
                remedy="leave such rows out, or fill them and weigh them with 0",
            )


def _name(path: Any) -> str:
    return pytree.keystr(path).lstrip(".") or "batch"


def _kind(value: Any) -> str:
    return type(value).__name__
