"""Row optimizers against formulas in float64, torch.optim, and what jax-tpu-embedding lowers for a TPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.optim import RowWiseAdagrad as TorchRowWise
from twinstep.worker.embedding.sparsecore.device import rules
from twinstep.worker.embedding.sparsecore.optimizers import (
    FTRL,
    OPTIMIZERS,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    LaProp,
    RowOptimizer,
    RowWiseAdagrad,
    Schedule,
)

ROWS, DIM, STEPS = 6, 8, 5


def run(optimizer: RowOptimizer, gradients: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return weights and slots after a step for each gradient."""
    shapes = [(ROWS, 1) if slot.per_row else w.shape for slot in optimizer.slots]
    slots = tuple(jnp.full(shape, slot.initial) for shape, slot in zip(shapes, optimizer.slots, strict=True))
    new = jnp.asarray(w)
    for step, g in enumerate(gradients):
        new, slots = rules.updated(
            optimizer, jnp.asarray(g), new, slots, rules.step_numbers(optimizer, jnp.int32(step))
        )
    return np.asarray(new), [np.asarray(slot) for slot in slots]


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(STEPS, ROWS, DIM)).astype(np.float32), random.normal(size=(ROWS, DIM)).astype(np.float32)


# Each formula as the papers and jax-tpu-embedding's documentation write it, in float64: (w, slots, g, t from 0).
def sgd(w: Any, s: list[Any], g: Any, t: int) -> Any:
    return w - 0.05 * g


def adagrad(w: Any, s: list[Any], g: Any, t: int) -> Any:
    s[0] = s[0] + g**2
    return w - 0.05 * g / np.sqrt(s[0])


def rowwise(w: Any, s: list[Any], g: Any, t: int) -> Any:
    s[0] = s[0] + (g**2).mean(1, keepdims=True)
    return w - 0.05 * g / (np.sqrt(s[0]) + 1e-8)


def momentum(w: Any, s: list[Any], g: Any, t: int) -> Any:
    s[0] = 0.9 * s[0] + 0.1 * g**2
    scaled = (s[0] + 1e-10) ** (-1 / 3.0) * g
    s[1] = 0.8 * s[1] + scaled
    return w - 0.05 * (0.8 * s[1] + scaled)


def adam(w: Any, s: list[Any], g: Any, t: int) -> Any:
    s[0] = 0.9 * s[0] + 0.1 * g
    s[1] = 0.99 * s[1] + 0.01 * g**2
    return w - 0.05 * (s[0] / (1 - 0.9 ** (t + 1))) / (np.sqrt(s[1] / (1 - 0.99 ** (t + 1))) + 1e-3)


def ftrl(w: Any, s: list[Any], g: Any, t: int) -> Any:
    new = s[0] + g**2
    sigma = (np.sqrt(new) - np.sqrt(s[0])) / 0.05
    s[0], s[1] = new, s[1] + g - sigma * w
    shrunk = np.where(np.abs(s[1]) <= 0.3, 0.0, -(s[1] - np.sign(s[1]) * 0.3))
    return shrunk / ((0.1 + np.sqrt(new)) / 0.05 + 2 * 0.2)


def ftrl_scaled(w: Any, s: list[Any], g: Any, t: int) -> Any:
    new = s[0] + g**2
    s[0], s[1] = new, s[1] + 0.05 * g - (np.sqrt(new) - np.sqrt(s[0])) * w
    return (np.clip(s[1], -0.015, 0.015) - s[1]) / (np.sqrt(new) + 2 * 0.05 * 0.2 + 0.1)


def laprop(w: Any, s: list[Any], g: Any, t: int) -> Any:
    r = 0.95 * (1 - 0.95**t) / (1 - 0.95 ** (t + 1))
    s[1] = r * s[1] + (1 - r) * (g**2 + 1e-30)
    s[0] = 0.9 * s[0] + math.sqrt(1 - 0.81) * g / np.sqrt(s[1])
    return w - 0.05 * s[0]


FORMULAS = [
    (SGD(learning_rate=0.05), sgd),
    (Adagrad(learning_rate=0.05), adagrad),
    (RowWiseAdagrad(learning_rate=0.05), rowwise),
    (AdagradMomentum(learning_rate=0.05, momentum=0.8, beta2=0.9, exponent=3.0, nesterov=True), momentum),
    (Adam(learning_rate=0.05, beta2=0.99, eps=1e-3), adam),
    (FTRL(learning_rate=0.05, l1=0.3, l2=0.2, beta=0.1), ftrl),
    (FTRL(learning_rate=0.05, l1=0.3, l2=0.2, beta=0.1, multiply_linear=True), ftrl_scaled),
    (LaProp(learning_rate=0.05), laprop),
]


@pytest.mark.parametrize(("optimizer", "formula"), FORMULAS, ids=[f.__name__ for _, f in FORMULAS])
def test_rules_equal_the_formulas_in_float64(optimizer: RowOptimizer, formula: Any, data: Any) -> None:
    gradients, w = data
    found, slots = run(optimizer, gradients, w)
    new = w.astype(np.float64)
    state: list[Any] = [np.full((ROWS, 1) if slot.per_row else w.shape, slot.initial) for slot in optimizer.slots]
    for t, g in enumerate(gradients.astype(np.float64)):
        new = formula(new, state, g, t)
    np.testing.assert_allclose(found, new, rtol=2e-5, atol=2e-6)
    for ours, theirs in zip(slots, state, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_every_optimizer_is_held_to_a_formula() -> None:
    assert {optimizer.kind for optimizer, _ in FORMULAS} == set(OPTIMIZERS)


TORCH = [
    (SGD(learning_rate=0.05, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
    (
        Adagrad(learning_rate=0.05, initial_accumulator=0.0, eps=1e-10),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-10),
    ),
    (RowWiseAdagrad(learning_rate=0.05, eps=1e-6), lambda p: TorchRowWise(p, lr=0.05, eps=1e-6)),
    (Adam(learning_rate=0.05, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3)),
    (Adam(learning_rate=0.05, eps=1e-12), lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-12)),
]


@pytest.mark.parametrize(("optimizer", "build"), TORCH, ids=["sgd", "adagrad", "rowwise", "adam", "sparse_adam"])
def test_rules_equal_torch(optimizer: RowOptimizer, build: Any, data: Any) -> None:
    gradients, w = data
    found, _ = run(optimizer, gradients, w)
    parameter = torch.nn.Parameter(torch.tensor(w))
    theirs = build([parameter])
    for g in gradients:
        parameter.grad = torch.tensor(g).to_sparse(1) if isinstance(theirs, torch.optim.SparseAdam) else torch.tensor(g)
        theirs.step()
    np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_clips_and_bounds_hold(data: Any) -> None:
    gradients, w = data
    clipped, _ = run(SGD(learning_rate=1.0, clip_value=0.25), gradients[:1], w)
    np.testing.assert_allclose(clipped, w - np.clip(gradients[0], -0.25, 0.25), rtol=1e-6)
    bounded, _ = run(SGD(learning_rate=1.0, weight_min=-0.5, weight_max=0.25), gradients, w)
    assert bounded.min() == -0.5
    assert bounded.max() == 0.25


def test_an_adagrad_that_starts_at_nothing_takes_no_undefined_step(data: Any) -> None:
    found, _ = run(Adagrad(initial_accumulator=0.0), np.zeros((1, ROWS, DIM), np.float32), data[1])
    assert np.array_equal(found, data[1])


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "exponential"])
def test_schedules_warm_up_decay_and_stay(decay: str) -> None:
    schedule = Schedule(rate=0.5, warmup_steps=4, decay=decay, decay_steps=10, final=0.1)
    rates = [float(schedule.at(jnp.int32(step), jnp)) for step in range(30)]
    assert rates[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert rates[14:] == pytest.approx([0.5 if decay == "none" else 0.05] * 16)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(rates[3:]))
    half = {"none": 0.5, "linear": 0.275, "cosine": 0.275, "exponential": 0.5 * math.sqrt(0.1)}
    assert rates[9] == pytest.approx(half[decay])
    assert [float(schedule.at(step, np)) for step in range(30)] == pytest.approx(rates)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Schedule(rate=-1.0),
        lambda: Schedule(rate=1.0, decay="cos"),
        lambda: Schedule(rate=1.0, decay="linear"),
        lambda: Schedule(rate=1.0, decay="exponential", decay_steps=3, final=0.0),
        lambda: SGD(learning_rate=float("nan")),
        lambda: SGD(clip_value=0.0),
        lambda: SGD(weight_min=1.0, weight_max=0.0),
    ],
)
def test_what_no_optimizer_can_be_is_refused(build: Any) -> None:
    with pytest.raises(SpecError) as found:
        build()
    assert found.value.remedy


def test_quantization_gives_the_levels_that_tensorflow_documents() -> None:
    from twinstep.worker.embedding.sparsecore.device.lookup import quantized
    from twinstep.worker.embedding.sparsecore.spec import Quantization

    x = jnp.asarray([-3.0, -1.0, -0.3, 0.0, 0.24, 0.26, 0.9, 5.0])
    assert quantized(x, Quantization(num_buckets=5, low=-1.0, high=1.0)).tolist() == [-1, -1, -0.5, 0, 0, 0.5, 1, 1]
    assert (
        jax.numpy.unique(quantized(jnp.linspace(-2, 2, 999), Quantization(num_buckets=7, low=0.0, high=1.0))).size == 7
    )
