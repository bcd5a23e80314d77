"""Labels of dimensions that grow with the batch, and what views, cuts and joins make of them. Plain arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchDim:
    """A dimension of length `outer · B · inner`: sample b is at `(o · B + b) · inner + i`."""

    outer: int = 1
    inner: int = 1

    def size(self, batch: int) -> int:
        """Return the length at a batch size."""
        return self.outer * batch * self.inner

    def __str__(self) -> str:
        return "·".join([str(self.outer)] * (self.outer > 1) + ["B"] + [str(self.inner)] * (self.inner > 1))


@dataclass(frozen=True, slots=True)
class JoinedDim:
    """A dimension made by `cat`: batch dimensions and fixed lengths, one after the other."""

    parts: tuple[BatchDim | int, ...]

    def size(self, batch: int) -> int:
        """Return the length at a batch size."""
        return sum(part if isinstance(part, int) else part.size(batch) for part in self.parts)

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


Label = BatchDim | JoinedDim
Dims = tuple[Label | None, ...]
"""One entry for each dimension of a tensor."""
Labels = Dims | tuple[Dims, ...]
"""Of a node with several results, one `Dims` a result."""


def leaf_dims(
    shapes: Mapping[str, Sequence[int]], *, declared: Mapping[str, int] | None = None
) -> tuple[int | None, dict[str, Dims]]:
    """Return the batch size (the shortest declared dimension, or most leaves' leading one), and each leaf's dimension.

    Args:
        shapes: of the leaves, by path.
        declared: position of the batch dimension by leaf; leaves it does not name have none. None: it is the leading
            one wherever that is as long as most leaves' leading one.
    """
    named = {path: tuple(shape) for path, shape in shapes.items()}
    if declared is not None:
        positions = {path: at for path, at in declared.items() if path in named and at < len(named[path])}
        size = min((named[path][at] for path, at in positions.items()), default=0)
    else:
        leading = Counter(shape[0] for shape in named.values() if shape)
        size = leading.most_common(1)[0][0] if leading else 0
        positions = {path: 0 for path, shape in named.items() if shape and shape[0] == size}
    if size < 2:  # one sample: every dimension of length 1 looks alike
        return None, {path: (None,) * len(shape) for path, shape in named.items()}
    found: dict[str, Dims] = {}
    for path, shape in named.items():
        at = positions.get(path)
        known = at is not None and shape[at] % size == 0 and shape[at] > 0
        label = BatchDim(inner=shape[at] // size) if known and at is not None else None
        found[path] = tuple(label if index == at else None for index in range(len(shape)))
    return size, found


def viewed(dims: Dims, old: tuple[int, ...], new: tuple[int, ...], batch: int) -> Dims:
    """Return the labels after a view from shape `old` to shape `new`.

    A dimension of the new shape is batch iff the sample's digit of the flat index lies wholly within it.
    """
    result: list[Label | None] = [None] * len(new)
    if 0 in old or 0 in new:
        return tuple(result)
    for at, label in enumerate(dims):
        below = math.prod(old[at + 1 :])
        stride = math.prod(new)
        for index, size in enumerate(new if label else ()):
            top, stride = stride, stride // size
            if isinstance(label, JoinedDim):
                if stride == below and size == old[at]:
                    result[index] = label
            elif label and size > 1:
                low = below * label.inner  # flat stride of one sample
                if low % stride == 0 and top % (low * batch) == 0:
                    result[index] = BatchDim(outer=top // (low * batch), inner=low // stride)
    return tuple(result)


def cut(whole: JoinedDim, start: int, length: int, batch: int) -> Label | None:
    """Return the label of whole parts of a joined dimension; None where a part is cut."""
    taken: list[BatchDim | int] = []
    at = 0
    for part in whole.parts:
        size = part if isinstance(part, int) else part.size(batch)
        if at >= start and at + size <= start + length:
            taken.append(part)
        at += size
    return joined(taken) if sum(JoinedDim((part,)).size(batch) for part in taken) == length else None


def joined(parts: Sequence[Label | int]) -> Label | None:
    flat: list[BatchDim | int] = []
    for part in parts:
        flat += part.parts if isinstance(part, JoinedDim) else (part,)
    if all(isinstance(part, int) for part in flat):
        return None
    return flat[0] if len(flat) == 1 and isinstance(flat[0], BatchDim) else JoinedDim(tuple(flat))
