"""What a Runner needs of a step beside its program, as bytes and back: so that a warm start traces nothing.

`pack` and `unpack` turn it into the parts of an entry of `store.py`. A tensor that the step closes over is not
stored: it is an input of the program, found again by its path. The tree of outputs is pickled, since it names the
user's own classes; it is unpickled only after the store has checked owner and sums.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from twinstep.worker.compile.accumulation import Left
from twinstep.worker.compile.guards import Guard, guard
from twinstep.worker.compile.program import Program
from twinstep.worker.compile.structure import OutputTree

if TYPE_CHECKING:
    from twinstep.worker.compile.capture import Captured

BACKEND = "backend/"
"""Prefix of the parts that are the backend's."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A captured step without its graph."""

    outputs: OutputTree
    nodes: int
    """Nodes of the captured graph."""
    constants: tuple[Tensor, ...]
    guard: Guard
    """How ids are checked before a step, and named after it failed."""
    paths: tuple[str | None, ...]
    """Where each constant is found that the step reads from elsewhere; None: the step made it."""
    from_none: bool
    """Whether it is right only where no gradients are there when it starts."""
    left: Left
    """What it leaves in the slots of gradients."""

    @classmethod
    def of(cls, captured: Captured, reached: Mapping[str, Tensor]) -> Kept:
        """Return what is kept of a captured step; `reached` are the tensors its code can reach, by path.

        Raises:
            CompileError: XLA would take other rows in silence for ids that nothing bounds.
        """
        paths = {_place(tensor): path for path, tensor in reached.items()}
        return cls(
            captured.outputs,
            len(captured.graph.graph.nodes),
            captured.constants,
            guard(captured),
            tuple(
                paths.get(_place(each), "") if index in captured.live else None
                for index, each in enumerate(captured.constants)
            ),
            captured.from_none,
            captured.left,
        )

    @property
    def storable(self) -> bool:
        """Whether another process can find all constants: false for a tensor that the step found, and we did not."""
        return "" not in self.paths


@dataclass(frozen=True, slots=True)
class Made:
    """A program, where it came from, and what goes with it."""

    program: Program
    kept: Kept
    cache: Literal["none", "disk", "backend", "ahead"]
    captured: Captured | None = None
    capture_seconds: float = 0.0


def pack(kept: Kept, backend_parts: Mapping[str, bytes]) -> dict[str, bytes] | None:
    """Return the parts of an entry, or None if it cannot be restored in another process."""
    if not kept.storable:
        return None
    parts: dict[str, bytes] = {}
    try:
        parts["outputs"] = pickle.dumps((_taken_apart(kept.outputs.spec), kept.outputs.constants))
    except (pickle.PicklingError, AttributeError, TypeError):  # a class within a function has no name to find it by
        return None
    described: list[Any] = []
    for index, (tensor, path) in enumerate(zip(kept.constants, kept.paths, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        described.append([path, dtype, list(tensor.shape), list(tensor.stride())])
        if path is None:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            parts[f"constant/{index}"] = flat.view(torch.uint8).numpy().tobytes()
    parts["guard"] = pickle.dumps(kept.guard)
    parts["step"] = json.dumps(
        {
            "nodes": kept.nodes,
            "constants": described,
            "from_none": kept.from_none,
            "left": kept.left,
        }
    ).encode()
    return parts | {f"{BACKEND}{name}": part for name, part in backend_parts.items()}


def unpack(parts: Mapping[str, bytes], reached: Mapping[str, Tensor]) -> tuple[Kept, dict[str, bytes]] | None:
    """Return what `pack` was given, or None if a tensor the step closes over is not where it was, or as it was."""
    step = json.loads(parts["step"])
    tree, leaves = pickle.loads(parts["outputs"])  # noqa: S301  the store has checked owner and sums
    constants: list[Tensor] = []
    for index, (path, dtype, shape, strides) in enumerate(step["constants"]):
        if path is None:
            tensor = _tensor(parts[f"constant/{index}"], getattr(torch, dtype), shape, strides)
        elif path not in reached:
            return None
        else:
            tensor = reached[path].detach()
        if (list(tensor.shape), list(tensor.stride()), tensor.dtype) != (shape, strides, getattr(torch, dtype)):
            return None
        constants.append(tensor)
    kept = Kept(
        outputs=OutputTree(_put_together(tree), leaves),
        nodes=step["nodes"],
        constants=tuple(constants),
        guard=pickle.loads(parts["guard"]),  # noqa: S301  as above
        paths=tuple(path for path, *_ in step["constants"]),
        from_none=step["from_none"],
        left=tuple(step["left"]),
    )
    prefix = len(BACKEND)
    return kept, {name[prefix:]: part for name, part in parts.items() if name.startswith(BACKEND)}


def _taken_apart(spec: pytree.TreeSpec) -> Any:
    """Return a tree's structure in plain tuples: torch's own classes for it warn when they are unpickled."""
    return None if spec.is_leaf() else (spec.type, spec.context, [_taken_apart(each) for each in spec.children()])


def _put_together(tree: Any) -> pytree.TreeSpec:
    if tree is None:
        return pytree.treespec_leaf()
    kind, context, children = tree
    return pytree.TreeSpec(kind, context, [_put_together(each) for each in children])


def _tensor(content: bytes, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype)
    if content:
        made.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape))
    return made


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
