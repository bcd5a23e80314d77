"""The whole model against the public one: outputs, gradients, one and three optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from twinstep.worker.data.batch import Batch
from twinstep.worker.embedding.optim import RowWiseAdagrad, split_parameters
from twinstep.worker.models.config import DLRMv3Config
from twinstep.worker.models.dlrmv3 import DLRMv3

# (U, T, K): own slots exactly; slots to spare; a token budget with a gather; the same with dummies.
LAYOUTS = {"aligned": (30, 120, 3), "padded": (41, 164, 5), "packed": (30, 59, 3), "packed with dummies": (37, 80, 4)}
SGD_LR, ADAGRAD_LR = 0.1, 0.001  # with which the fixture's steps were made


def load(config: DLRMv3Config, fixture: dict[str, np.ndarray]) -> DLRMv3:
    model = DLRMv3(config)
    params = {k.removeprefix("params/"): torch.from_numpy(v.copy()) for k, v in fixture.items() if k[:7] == "params/"}
    result = model.load_state_dict(params, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == ["_hstu_transducer._input_preprocessor._action_encoder._combined_action_weights"]
    return model


def close(ours: torch.Tensor, theirs: np.ndarray, *, rtol: float, name: str) -> None:
    """Compare to within rtol of the largest value."""
    error = float((ours.detach() - torch.from_numpy(theirs.copy())).abs().max()) if theirs.size else 0.0
    scale = float(np.abs(theirs).max()) if theirs.size else 0.0
    assert error <= rtol * max(scale, 1e-6), f"{name}: {error:.3g} of {scale:.3g}"


@pytest.fixture(params=list(LAYOUTS))
def case(
    request: pytest.FixtureRequest,
    kuairand: dict[str, np.ndarray],
    kuairand_config: DLRMv3Config,
    kuairand_batch: Callable[..., Batch],
) -> tuple[DLRMv3, Batch]:
    slots, tokens, width = LAYOUTS[request.param]
    return load(kuairand_config, kuairand), kuairand_batch(0, slots=slots, tokens=tokens, num_candidates=width)


def test_parameter_names_and_shapes_are_the_public_ones(
    kuairand: dict[str, np.ndarray], kuairand_config: DLRMv3Config
) -> None:
    theirs = {k.removeprefix("params/"): v.shape for k, v in kuairand.items() if k.startswith("params/")}
    ours = {name: tuple(p.shape) for name, p in DLRMv3(kuairand_config).named_parameters()}
    assert ours == theirs


def test_outputs_and_every_gradient_are_the_public_models_in_every_layout(
    case: tuple[DLRMv3, Batch], kuairand: dict[str, np.ndarray]
) -> None:
    model, batch = case
    out = model(batch)
    out.loss.backward()
    valid = torch.arange(batch.cand_times.shape[1]) < batch.num_candidates[:, None]
    close(torch.sigmoid(out.logits[:, valid]), kuairand["out/preds"], rtol=1e-5, name="predictions")
    close(out.loss, kuairand["out/total"], rtol=1e-5, name="loss")
    assert np.array_equal(batch.labels[:, valid].numpy(), kuairand["out/labels"])
    for task, loss in zip(model.config.tasks, out.task_losses, strict=True):
        close(loss, kuairand[f"out/loss/{task.name}"], rtol=1e-5, name=task.name)
    unused = set(kuairand["unused_params"].tolist())
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name in unused), name
        if param.grad is not None:
            close(param.grad, kuairand[f"grads/{name}"], rtol=1e-5, name=name)


def step(model: DLRMv3, batch: Batch, *optimizers: torch.optim.Optimizer) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(batch).loss
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


def test_one_step_of_sgd_lands_on_the_public_parameters(
    case: tuple[DLRMv3, Batch], kuairand: dict[str, np.ndarray]
) -> None:
    model, batch = case
    step(model, batch, torch.optim.SGD(model.parameters(), lr=SGD_LR))
    for key, param in model.named_parameters():
        close(param, kuairand[f"sgd1/{key}"], rtol=1e-5, name=key)


def test_three_steps_of_adam_follow_the_public_losses_and_parameters(
    kuairand: dict[str, np.ndarray], kuairand_config: DLRMv3Config, kuairand_batch: Callable[..., Batch]
) -> None:
    model = load(kuairand_config, kuairand)
    adam = json.loads(str(kuairand["adam_json"]))
    optimizer = torch.optim.Adam(model.parameters(), **{**adam, "betas": tuple(adam["betas"])})
    losses = []
    for number in range(3):
        losses.append(step(model, kuairand_batch(number, slots=40, tokens=70, num_candidates=3), optimizer))
        prefix = "adam1" if number == 0 else "adamN" if number == 2 else ""
        for name, param in model.named_parameters():
            if prefix and f"{prefix}/{name}" in kuairand:
                # Adam turns a gradient of 1e-9 into a whole step, so rounding shows where gradients are that small.
                loose = "_input_norm_bias" in name or "_uvqk_beta" in name or name.endswith(".bias")
                close(param, kuairand[f"{prefix}/{name}"], rtol=0.05 if loose else 2e-3, name=name)
    assert np.allclose(losses, kuairand["adamN/totals"], rtol=1e-5)


def test_row_wise_adagrad_on_tables_lands_on_the_public_tables(
    case: tuple[DLRMv3, Batch], kuairand: dict[str, np.ndarray]
) -> None:
    model, batch = case
    _, tables = split_parameters(model)
    step(model, batch, RowWiseAdagrad([p for _, p in tables], lr=ADAGRAD_LR, eps=1e-8))
    for name, param in tables:
        close(param, kuairand[f"rowwise_adagrad1/{name}"], rtol=1e-5, name=name)
