"""Where an optimizer turns rounding into a full step: how much a parameter's error may be of that kind.

Adam, Adagrad and RMSprop divide by the gradient's own size. A gradient that is zero in exact arithmetic (a bias before
a norm layer) is some 1e-9 of rounding, whose sign differs between two right programs, and the parameter moves by ± lr.
So the error of a parameter is weighed by its gradient: each step allows an element, beside its tolerance,

    2 · min(largest move of any element so far, |its own move| · noise / |its largest gradient so far|)

with noise = NOISE_EPS · eps · (largest |gradient| of the step), all of eager's run alone: a wrong program cannot excuse
itself. An element of ordinary gradient is allowed next to nothing by it; one that eager gave no gradient, nothing at
all, unless its whole tensor is below the noise: then the zero is rounding as well, and may be a largest move off. The
optimizer's own tensors are weighed alike. Buffers (running means) follow parameters, so each may be off by as much as
any parameter that is all noise. Every tensor's report says how many elements were weighed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

NOISE_EPS = 8
"""Rounding of a gradient in units of its dtype's eps and of the step's largest gradient: sums over a batch round in
another order; √(batch) of some 64 is 8."""


class GradientNoise:
    """Adds up, step by step, what each element of the state may be off for noise in its gradient.

    Args:
        eps: of the dtype that the step computes in.
    """

    def __init__(self, *, eps: float) -> None:
        self._eps = eps
        self._largest: dict[str, Tensor] = {}
        self._allowed: dict[str, Tensor] = {}
        self._limits: dict[str, float] = {}
        """Largest move of any element so far, by group."""
        self._noisy = 0.0
        """What the worst parameter that is all noise may be off by."""
        self.floor = 0.0
        """Noise of a gradient's element in the newest step."""

    def add_step(
        self,
        gradients: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        owners: Mapping[str, tuple[str, str]],
    ) -> None:
        """Take in one step of eager's run.

        Args:
            gradients: what the optimizers read, by the parameter's name.
            before: the state before the step, by path; what is missing there counts as zeros.
            after: the state after it, by path.
            owners: for each path to weigh, its group (what may be compared in size) and its parameter's name.
        """
        self.floor = NOISE_EPS * self._eps * largest(gradients.values())
        shares = {name: self._share(name, gradient) for name, gradient in gradients.items()}
        moves = {path: _move(before.get(path), after[path]) for path in owners if path in after}
        for path, move in moves.items():
            group = owners[path][0]
            self._limits[group] = max(self._limits.get(group, 0.0), largest((move,)))
        for path, move in moves.items():
            group, name = owners[path]
            share = _fitting(shares[name], move) if name in shares else None
            if share is not None:
                self._allow(path, move, share, self._limits[group])
                if path.startswith("parameter:") and 0 < largest((self._largest[name],)) <= self.floor:
                    self._noisy = max(self._noisy, largest((self._allowed[path],)))

    def _allow(self, path: str, move: Tensor, share: Tensor, limit: float) -> None:
        if not path.startswith("parameter:"):
            share = share + share.square()  # second moments: (g + noise)² − g²
        allowed = torch.where(share.isinf(), limit, torch.clamp(move * share, max=limit))
        allowed = 2 * torch.nan_to_num(allowed)
        self._allowed[path] = self._allowed[path] + allowed if path in self._allowed else allowed

    def allowance(self, path: str, like: Tensor) -> Tensor | None:
        """Return what each element of a tensor of the state may be off by now, or None for nothing."""
        if not like.is_floating_point():
            return None
        if path.startswith("buffer:"):
            return torch.full(like.shape, self._noisy, dtype=torch.float64, device=like.device) if self._noisy else None
        return self._allowed.get(path)

    def _share(self, name: str, gradient: Tensor) -> Tensor:
        """Return noise over the largest gradient so far, per element: 0 where there was none, infinite in noise."""
        size = gradient.detach().abs().double()
        sizes = torch.maximum(self._largest[name], size) if name in self._largest else size
        self._largest[name] = sizes
        all_noise = 0 < largest((sizes,)) <= self.floor
        return torch.where(sizes > 0, self.floor / sizes, math.inf if all_noise else 0.0)


def _move(before: Tensor | None, after: Tensor) -> Tensor:
    after = after.detach().double()
    return after.abs() if before is None else (after - before.detach().double()).abs()


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite |element|, 0 of none."""
    finite = (torch.nan_to_num(each.detach().double(), posinf=0.0, neginf=0.0) for each in tensors if each.numel())
    return max((float(each.abs().max()) for each in finite), default=0.0)


def _fitting(share: Tensor, move: Tensor) -> Tensor | None:
    """Return a parameter's shares as a tensor of its optimizer has them: its own shape, or one number per row."""
    if share.shape == move.shape:
        return share
    if share.dim() == 2 and move.shape == (share.shape[0], 1):
        return share.amax(dim=1, keepdim=True)
    return None
