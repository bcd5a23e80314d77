"""How a table's rows are updated, as frozen values: the optimizer, its slots, its learning-rate schedule, its clips.

Plans compare them (only tables with equal optimizers share a stack), `device/rules.py` computes them. No jax here.
The kinds and defaults are those of jax-tpu-embedding's OptimizerSpecs, and FBGEMM's for row-wise Adagrad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from twinstep.spec.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning rate as a function of the step, which counts from 0.

    Linear from 0 over `warmup_steps`, then by `decay` until `decay_steps` steps later, then constant at
    `rate * final`.
    """

    rate: float
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Step s < warmup_steps has rate * (s + 1) / warmup_steps."""
    decay: str = "none"
    """none, linear, cosine or exponential."""
    decay_steps: int = 0
    """Steps from the end of the warm-up to the final rate."""
    final: float = 1.0
    """The final rate, as a part of `rate`."""

    def __post_init__(self) -> None:
        """Refuse what no schedule can be.

        Raises:
            SpecError: a field is out of its range; the message names it.
        """
        _need(math.isfinite(self.rate) and self.rate >= 0, "rate", self.rate, "a number from 0 up")
        _need(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "a whole number from 0 up")
        _need(self.decay in DECAYS, "decay", self.decay, ", ".join(DECAYS))
        least = 0 if self.decay == "none" else 1
        _need(self.decay_steps >= least, "decay_steps", self.decay_steps, f"a whole number from {least} up")
        low = self.final > 0 if self.decay == "exponential" else self.final >= 0
        _need(low and self.final <= 1, "final", self.final, "a part of 1; over 0 for exponential")

    def at(self, step: Any, xp: Any) -> Any:
        """Return the rate at `step`, a 0-d integer array of `xp` (numpy or jax.numpy), as 0-d float32."""
        past = xp.asarray(step, dtype=xp.float32)
        warm = xp.minimum((past + 1.0) / max(self.warmup_steps, 1), 1.0) if self.warmup_steps else 1.0
        done = xp.clip((past - self.warmup_steps) / max(self.decay_steps, 1), 0.0, 1.0)
        part: Any = 1.0
        if self.decay == "linear":
            part = 1.0 + (self.final - 1.0) * done
        elif self.decay == "cosine":
            part = self.final + (1.0 - self.final) * 0.5 * (1.0 + xp.cos(math.pi * done))
        elif self.decay == "exponential":
            part = xp.exp(math.log(self.final) * done)
        return xp.asarray(self.rate * warm * part, dtype=xp.float32)


DECAYS = ("none", "linear", "cosine", "exponential")


def _need(fits: bool, name: str, value: object, allowed: str) -> None:
    if not fits:
        raise SpecError(f"{name} is {value!r}", remedy=f"allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Slot:
    """Something an optimizer keeps of each row."""

    name: str
    initial: float
    per_row: bool = False
    """One number for a row instead of one for each of its values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptimizer:
    """What all optimizers have. Only rows that a batch names are touched, each once a step."""

    kind: ClassVar[str] = ""
    learning_rate: float | Schedule = 0.001
    """Constant, or by step."""
    weight_decay: float = 0.0
    """λ: λ·w is added to a touched row's gradient."""
    clip_value: float | None = None
    """c: each value of a row's summed gradient is held in [-c, c], before weight decay."""
    clip_norm: float | None = None
    """c: a table's gradient, all rows of the batch together, is scaled down to a 2-norm of at most c."""
    weight_min: float | None = None
    weight_max: float | None = None
    """Bounds of a new weight."""

    def __post_init__(self) -> None:
        """Refuse values with which a row could not be updated.

        Raises:
            SpecError: a field is out of its range; the message names it.
        """
        if not isinstance(self.learning_rate, Schedule):
            Schedule(rate=self.learning_rate)
        _need(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number from 0 up")
        for name in ("clip_value", "clip_norm"):
            value = getattr(self, name)
            _need(value is None or value > 0, name, value, "a number over 0, or none")
        low, high = self.weight_min, self.weight_max
        _need(low is None or high is None or low <= high, "weight_min", low, f"at most weight_max, which is {high}")

    @property
    def schedule(self) -> Schedule:
        """The learning rate as a schedule."""
        return self.learning_rate if isinstance(self.learning_rate, Schedule) else Schedule(rate=self.learning_rate)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is kept of each row, in the order in which the rule takes and returns it."""
        return ()

    @property
    def slot_floats(self) -> int:
        """Slots with a number for each value of a row: what memory models multiply by."""
        return sum(not slot.per_row for slot in self.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(RowOptimizer):
    """w -= lr·g."""

    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(RowOptimizer):
    """a += g²; w -= lr·g / (sqrt(a) + eps). With eps 0 jax-tpu-embedding's, with initial 0 and an eps torch's."""

    kind: ClassVar[str] = "adagrad"
    initial_accumulator: float = 0.1
    eps: float = 0.0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sum of squares."""
        return (Slot("accumulator", self.initial_accumulator),)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(RowOptimizer):
    """a += mean(g²) over the row's true width; w -= lr·g / (sqrt(a) + eps): FBGEMM's exact row-wise Adagrad."""

    kind: ClassVar[str] = "rowwise_adagrad"
    initial_accumulator: float = 0.0
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """One sum of squares a row."""
        return (Slot("accumulator", self.initial_accumulator, per_row=True),)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradMomentum(RowOptimizer):
    """a = a + g² (beta2 1) or beta2·a + (1-beta2)·g²; s = (a+eps)^(-1/exponent)·g; m = k·m + s; w -= lr·m.

    With Nesterov's momentum w -= lr·(k·m + s), with the new m. k is `momentum`.
    """

    kind: ClassVar[str] = "adagrad_momentum"
    momentum: float = 0.9
    beta2: float = 1.0
    eps: float = 1e-10
    exponent: float = 2.0
    nesterov: bool = False
    initial_accumulator: float = 0.1

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sum of squares and the momentum."""
        return (Slot("accumulator", self.initial_accumulator), Slot("momentum", 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(RowOptimizer):
    """Adam (Kingma, Ba: arXiv 1412.6980, section 2.1) on touched rows; others keep their moments.

    m += (1-b1)(g-m); v += (1-b2)(g²-v); w -= lr·c/(1-b1^t) · m / (sqrt(v) + eps·c), c = sqrt(1-b2^t), t = step + 1.
    """

    kind: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The first and the second moment."""
        return (Slot("momentum", 0.0), Slot("velocity", 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRL(RowOptimizer):
    """Follow the regularised leader, proximal (McMahan et al., KDD 2013), as jax-tpu-embedding computes it.

    a' = a + g²; d = a'^-p - a^-p; z += g - d/lr·w; num = -z without l1, else clamp(z, -l1, l1) - z;
    den = (a'^-p + beta)/lr + 2·l2; w = num/den. With `multiply_linear` z holds lr times as much: z += lr·g - d·w,
    l1 counts lr·l1, den = a'^-p + 2·lr·l2 + beta. p is `power`.
    """

    kind: ClassVar[str] = "ftrl"
    power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    multiply_linear: bool = False
    initial_accumulator: float = 0.1

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sum of squares and the linear term."""
        return (Slot("accumulator", self.initial_accumulator), Slot("linear", 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaProp(RowOptimizer):
    """LaProp (Ziyin et al., arXiv 2002.04839) as jax-tpu-embedding computes it.

    nu = r·nu + (1-r)(g² + eps); mu = b1·mu + sqrt(1-b1²)·g/sqrt(nu); w -= lr·mu; r = b2(1-b2^t)/(1-b2^(t+1)), t the
    step from 0.
    """

    kind: ClassVar[str] = "laprop"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-30

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum and the mean square."""
        return (Slot("mu", 0.0), Slot("nu", 0.0))


OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    each.kind: each for each in (SGD, Adagrad, RowWiseAdagrad, AdagradMomentum, Adam, FTRL, LaProp)
}
"""By kind."""
