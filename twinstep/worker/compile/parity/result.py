"""What a parity run found, as frozen values: per backend and tensor, and when each first left its tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from twinstep.worker.compile.parity.compare import KINDS, Difference, Kind, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """One tensor over all steps, against eager's."""

    kind: Kind
    name: str
    """Path in the outputs, or the name of a parameter, buffer or optimizer's tensor."""
    dtype: str
    shape: tuple[int, ...]
    tolerance: Tolerance
    steps: tuple[Difference, ...]
    """One per step, from step 1."""
    excluded: str = ""
    """Why the tensor is not held to its tolerance; empty: it is."""

    @property
    def worst(self) -> Difference:
        """The step with the largest ratio."""
        return max(self.steps, key=lambda each: each.ratio if not math.isnan(each.ratio) else math.inf)

    @property
    def first_over(self) -> int | None:
        """First step, from 1, in which the tensor is over its tolerance."""
        if self.excluded:
            return None
        return next((step for step, each in enumerate(self.steps, start=1) if each.over), None)

    @property
    def ok(self) -> bool:
        """Whether it stays within its tolerance, or is excluded."""
        return self.first_over is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """What a divergence goes away without."""

    kind: Literal["pass", "strategy", "in-place state", "lowering", "capture"]
    name: str
    """Name of the pass, of the strategy, or of the backend."""
    strategy: str = ""
    """Strategy that the pass belongs to, if any."""
    tried: tuple[str, ...] = ()
    """What was switched off, one after the other."""

    def __str__(self) -> str:
        if self.kind == "pass":
            return f"pass {self.name!r}" + (f" of strategy {self.strategy!r}" if self.strategy else "")
        if self.kind == "strategy":
            return f"the lowering of strategy {self.name!r}"
        if self.kind == "in-place state":
            return f"{self.name}'s writing of new state over old"
        if self.kind == "capture":
            return "the capture itself, or several passes together"
        return f"{self.name}'s lowering"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendReport:
    """One backend against eager."""

    backend: str
    tensors: tuple[TensorReport, ...]
    """In the order in which the step's graph computes them."""
    compile_seconds: float
    culprit: Culprit | None = None

    @property
    def ok(self) -> bool:
        """Whether every tensor stayed within its tolerance at every step."""
        return all(each.ok for each in self.tensors)

    @property
    def first_divergent(self) -> tuple[int, TensorReport] | None:
        """The step and tensor that diverged first: by step, then in the order the graph computes them."""
        firsts = [(each.first_over, index) for index, each in enumerate(self.tensors)]
        over = [(step, index) for step, index in firsts if step is not None]
        if not over:
            return None
        step, index = min(over)
        return step, self.tensors[index]

    def of_kind(self, kind: Kind) -> list[TensorReport]:
        """Return the tensors of one kind."""
        return [each for each in self.tensors if each.kind == kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Eager PyTorch against compiled backends, from one state, on the same batches."""

    name: str
    steps: int
    backends: tuple[BackendReport, ...]
    threads: int
    versions: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every backend is within tolerance."""
        return all(each.ok for each in self.backends)

    def rows(self) -> Iterator[tuple[BackendReport, Kind, TensorReport]]:
        """Yield each backend's worst tensor of each kind."""
        for backend in self.backends:
            for kind in KINDS:
                found = [each for each in backend.of_kind(kind) if not each.excluded] or backend.of_kind(kind)
                if found:
                    yield backend, kind, max(found, key=lambda each: each.worst.ratio)

    def summary(self) -> str:
        """Return one line per backend: within tolerance, or the first tensor that is not, and the culprit."""
        return "\n".join(_sentence(each, self.steps) for each in self.backends)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; what is not finite is a text."""
        return {
            "name": self.name,
            "ok": self.ok,
            "steps": self.steps,
            "threads": self.threads,
            "versions": self.versions,
            "backends": [_backend_json(each) for each in self.backends],
        }

    def to_html(self) -> str:
        """Return the report as one page that loads nothing."""
        from twinstep.worker.compile.parity.report import render

        return render(self)


def _sentence(backend: BackendReport, steps: int) -> str:
    found = backend.first_divergent
    if found is None:
        return f"{backend.backend}: within tolerance of eager over {steps} steps ({len(backend.tensors)} tensors)"
    step, tensor = found
    diff = tensor.steps[step - 1]
    line = (
        f"{backend.backend}: {tensor.kind} {tensor.name} is the first over tolerance, at step {step}: "
        f"off by {diff.max_abs:.3g} ({diff.max_rel:.3g} relative), {diff.ratio:.3g} times what is allowed"
    )
    line += f"; {diff.note}" if diff.note else ""
    return line + (f"; cause: {backend.culprit}" if backend.culprit else "")


def _backend_json(backend: BackendReport) -> dict[str, Any]:
    found = backend.first_divergent
    return {
        "backend": backend.backend,
        "ok": backend.ok,
        "compile_seconds": round(backend.compile_seconds, 3),
        "first_divergent": None if found is None else {"step": found[0], "kind": found[1].kind, "name": found[1].name},
        "culprit": None
        if backend.culprit is None
        else {
            "kind": backend.culprit.kind,
            "name": backend.culprit.name,
            "strategy": backend.culprit.strategy or None,
            "tried": list(backend.culprit.tried),
        },
        "tensors": [_tensor_json(each) for each in backend.tensors],
    }


def _tensor_json(tensor: TensorReport) -> dict[str, Any]:
    worst = tensor.worst
    return {
        "kind": tensor.kind,
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "ok": tensor.ok,
        "first_over": tensor.first_over,
        "max_abs": plain(worst.max_abs),
        "max_rel": plain(worst.max_rel),
        "ratio": plain(worst.ratio),
        "at": list(worst.at),
        "weighed": max(each.weighed for each in tensor.steps),
        "note": worst.note or None,
        "excluded": tensor.excluded or None,
        "tolerance": {"relative": tensor.tolerance.relative, "absolute": tensor.tolerance.absolute},
        "ratio_by_step": [plain(each.ratio) for each in tensor.steps],
    }


def plain(value: float) -> float | str:
    """Return a number as JSON may hold it."""
    return value if math.isfinite(value) else str(value)
