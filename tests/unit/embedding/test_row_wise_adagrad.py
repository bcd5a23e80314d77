"""Row-wise Adagrad against its rule written out, and the optimizers a spec asks for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twinstep.spec.optimizers import OPTIMIZER_SETTINGS, OptimizersSpec
from twinstep.worker.embedding.collection import EmbeddingCollection
from twinstep.worker.embedding.optim import OPTIMIZERS, RowWiseAdagrad, build_optimizers, split_parameters


def table(rows: int = 5, dim: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)))


def test_three_steps_follow_the_rule_written_out_row_by_row() -> None:
    weight, expected = table(), table().detach().clone()
    optimizer = RowWiseAdagrad([weight], lr=0.1, eps=1e-6)
    total = [0.0] * 5
    for step in range(3):
        grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        weight.grad = grad.clone()
        optimizer.step()
        for row in range(5):
            total[row] += float(grad[row].square().mean())
            expected[row] -= 0.1 * grad[row] / (total[row] ** 0.5 + 1e-6)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-6)
    assert optimizer.state[weight]["sum"].shape == (5, 1)
    torch.testing.assert_close(optimizer.state[weight]["sum"].flatten(), torch.tensor(total), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_row_without_gradient_keeps_its_bits(weight_decay: float) -> None:
    weight = table()
    before = weight.detach().clone()
    optimizer = RowWiseAdagrad([weight], lr=0.5, weight_decay=weight_decay)
    for _ in range(3):
        weight.grad = torch.zeros(5, 4)
        weight.grad[2] = 1.0
        optimizer.step()
    kept = [0, 1, 3, 4]
    assert torch.equal(weight.detach()[kept], before[kept])
    assert not torch.equal(weight.detach()[2], before[2])


def test_two_ids_on_one_row_add_gradients_before_the_update() -> None:
    tables = EmbeddingCollection({"item": (5, 4)})
    weight = tables.embeddings["item"].weight
    nn.init.zeros_(weight)
    optimizer = RowWiseAdagrad([weight], lr=1.0, eps=1e-12)
    tables("item", torch.tensor([3, 3, 1]), torch.ones(3, dtype=torch.bool)).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["sum"].flatten().tolist() == [0, 1, 0, 4, 0]  # (1 + 1)², not 1² + 1²
    torch.testing.assert_close(weight.detach()[3], torch.full((4,), -1.0))


def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step() -> None:
    by_float, by_tensor, lr = table(), table(), torch.tensor(0.1)
    plain, lifted = RowWiseAdagrad([by_float], lr=0.1), RowWiseAdagrad([by_tensor], lr=lr)
    for step in range(3):
        grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        by_float.grad, by_tensor.grad = grad.clone(), grad.clone()
        plain.step()
        lifted.step()
        plain.param_groups[0]["lr"] /= 2
        lr /= 2
    torch.testing.assert_close(by_float, by_tensor, rtol=1e-6, atol=0)


def test_state_survives_saving_and_loading() -> None:
    weight, other = table(), table()
    first, second = RowWiseAdagrad([weight], lr=0.1), RowWiseAdagrad([other], lr=0.3)
    weight.grad = torch.ones(5, 4)
    first.step()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[other]["sum"], first.state[weight]["sum"])
    assert second.param_groups[0]["lr"] == 0.1


def test_ids_that_are_not_valid_give_zeros_and_gradients_of_exactly_zero() -> None:
    tables = EmbeddingCollection({"item": (3, 2)})
    weight = tables.embeddings["item"].weight
    nn.init.ones_(weight)
    out = tables("item", torch.tensor([2, 99, -1]), torch.tensor([True, False, False]))
    assert out.tolist() == [[1, 1], [0, 0], [0, 0]]
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0], [0, 0], [1, 1]]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection({"a": (4, 2), "b": (3, 2)})
        self.top = nn.Linear(2, 1)
        self.tied = self.tables.embeddings["a"]


def test_parameters_are_divided_by_kind_each_once() -> None:
    dense, tables = split_parameters(Toy())
    assert [name for name, _ in dense] == ["top.weight", "top.bias"]
    assert [name for name, _ in tables] == ["tables.embeddings.a.weight", "tables.embeddings.b.weight"]


@pytest.mark.parametrize("dense", ["sgd", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("sparse", list(OPTIMIZERS))
def test_every_kind_of_a_spec_is_built_and_steps(dense: str, sparse: str) -> None:
    spec = OptimizersSpec.model_validate({"dense": {"kind": dense, "lr": 0.1}, "sparse": {"kind": sparse, "lr": 0.1}})
    model = Toy()
    for weight in (t.weight for t in model.tables.embeddings.values()):
        nn.init.ones_(weight)
    optimizers = build_optimizers(spec, model)
    assert list(optimizers) == ["dense", "sparse"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.top(model.tables("a", torch.tensor([1]), torch.tensor([True]))).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"tables.embeddings.a.weight", "top.weight", "top.bias"}


SETTINGS = {"momentum": 0.5, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1, "lr": 0.25}


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad", "rowwise_adagrad"])
def test_an_optimizer_has_every_setting_that_a_spec_lets_its_kind_have(kind: str) -> None:
    allowed = {name: value for name, value in SETTINGS.items() if kind in OPTIMIZER_SETTINGS.get(name, (kind,))}
    spec = OptimizersSpec.model_validate({"sparse": {"kind": kind, **allowed}})
    model = EmbeddingCollection({"a": (3, 2)})
    (group,) = build_optimizers(spec, nn.ModuleList([nn.Linear(2, 2), model]))["sparse"].param_groups
    assert {name: group[name] for name in allowed} == allowed
