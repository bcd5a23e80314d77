"""What a batch's shape must not change: dummies, spare room, dummy rows and order leave every number alone."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.batch import Batch
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.embedding.optim import build_optimizers, split_parameters
from twinstep.worker.models.registry import build_model

SLOTS = 6 * 45  # B * U


def spec_with(**data: object) -> JobSpec:
    base = {"dataset": "synthetic", "synthetic_events": 600, "batch_size": 6, "uih_len": 45, "num_candidates": 3}
    sizes = {"embedding_dim": 8, "transducer_dim": 12, "linear_dim": 5, "attention_dim": 6, "hidden_dim": 16}
    return validate_spec({"name": "t", "data": base | data, "model": sizes})


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(spec_with().data)


@pytest.fixture
def model(dataset: Dataset) -> nn.Module:
    return build_model(spec_with(), dataset.schema)


def grads(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(batch)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits.detach(), found


def batches(dataset: Dataset, *specs: dict[str, object], number: int) -> list[Batch]:
    """The same samples in several shapes; the loader's order does not depend on them."""
    return [Loader(dataset, spec_with(**spec).data, seed=0).train_batch(number)[0] for spec in specs]


@pytest.mark.parametrize("bias", ["none", "time", "position", "both"])
@pytest.mark.parametrize("postprocessor", ["layer_norm", "l2_norm"])
def test_a_candidates_own_time_tells_nothing_beyond_the_moment_of_the_query(
    dataset: Dataset, bias: str, postprocessor: str
) -> None:
    data = spec_with().model_dump(mode="json")
    spec = validate_spec({**data, "model": {**data["model"], "relative_bias": bias, "postprocessor": postprocessor}})
    model = build_model(spec, dataset.schema).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # tables of distances begin at 0
    batch, _ = Loader(dataset, spec.data, seed=0).train_batch(0)
    there = torch.arange(batch.cand_times.shape[1]) < batch.num_candidates.unsqueeze(1)
    assert int((there.sum(1) > 1).sum()), "a row of several candidates"
    later = batch._replace(cand_times=batch.query_times.unsqueeze(1) + there * torch.tensor([0, 10**5, 10**7]))
    at_once = batch._replace(cand_times=batch.query_times.unsqueeze(1).expand_as(batch.cand_times))
    found, want = (model(each).logits[:, there] for each in (later, at_once))
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("number", range(6))
def test_packing_with_dummies_gives_the_numbers_of_own_slots(dataset: Dataset, model: nn.Module, number: int) -> None:
    own, packed = batches(dataset, {}, {"uih_budget": 36}, number=number)
    assert int(packed.uih_lengths.sum()) == int(own.uih_lengths.sum())
    assert int((packed.token_slot == SLOTS).sum()) > 0
    (loss, logits, grad), (loss2, logits2, grad2) = grads(model, own), grads(model, packed)
    torch.testing.assert_close(loss, loss2, rtol=2e-7, atol=0)
    valid = own.weights > 0
    torch.testing.assert_close(logits[valid], logits2[valid], rtol=1e-5, atol=1e-6)
    for name, value in grad.items():
        torch.testing.assert_close(value, grad2[name], rtol=1e-5, atol=1e-6, msg=name)


def test_noise_in_dummies_and_empty_slots_reaches_neither_loss_nor_gradient(dataset: Dataset, model: nn.Module) -> None:
    for spec in ({}, {"uih_budget": 36}):
        loader = Loader(dataset, spec_with(**spec).data, seed=0)
        batch = next(b for b, stats in loader.train_batches() if stats.padded_candidates and stats.dummy_tokens)
        tokens, slots = batch.token_slot == SLOTS, batch.weights[0] == 0
        assert tokens.any()
        assert slots.any()
        noisy = batch._replace(
            uih_ids=torch.where(tokens, 7, batch.uih_ids),
            uih_times=torch.where(tokens, 10**9 + 5, batch.uih_times),
            uih_actions=torch.where(tokens, 31, batch.uih_actions),
            cand_ids=torch.where(slots, 9, batch.cand_ids),
            cand_times=torch.where(slots, 10**9, batch.cand_times),
            labels=torch.where(slots, 1.0, batch.labels),
        )
        (loss, _, grad), (loss2, _, grad2) = grads(model, batch), grads(model, noisy)
        assert torch.equal(loss, loss2)
        for name, value in grad.items():
            assert torch.equal(value, grad2[name]), name


def test_dummy_rows_change_nothing_and_take_no_gradient(dataset: Dataset, model: nn.Module) -> None:
    spec = spec_with()
    last, stats = list(Loader(dataset, spec.data, seed=0).eval_batches())[-1]
    assert stats.rows < 6
    alone = Loader(dataset, spec_with(batch_size=stats.rows).data, seed=0)
    batch = next(b for b, _ in alone.eval_batches() if torch.equal(b.query_times, last.query_times[: stats.rows]))
    (loss, logits, grad), (loss2, logits2, grad2) = grads(model, batch), grads(model, last)
    torch.testing.assert_close(loss, loss2, rtol=2e-7, atol=0)
    torch.testing.assert_close(logits, logits2[:, : stats.rows], rtol=1e-5, atol=1e-6)
    for name, value in grad.items():
        torch.testing.assert_close(value, grad2[name], rtol=1e-5, atol=1e-6, msg=name)


def test_table_rows_that_no_real_id_names_keep_their_bits_over_a_step(dataset: Dataset, model: nn.Module) -> None:
    (batch,) = batches(dataset, {"uih_budget": 36}, number=2)
    real = set(batch.uih_ids[0][batch.token_slot < SLOTS].tolist())
    real |= set(batch.cand_ids[0][batch.weights[0] > 0].tolist())
    optimizers = build_optimizers(spec_with().optimizers, model)
    table = dict(split_parameters(model)[1])["_embedding_collection.embeddings.item_id.weight"]
    before = table.detach().clone()
    grads(model, batch)
    optimizers["sparse"].step()
    changed = (table.detach() != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == real


def test_candidates_do_not_see_each_other(dataset: Dataset, model: nn.Module) -> None:
    batch = next(Loader(dataset, spec_with().data, seed=0).eval_batches())[0]
    other = batch._replace(cand_ids=batch.cand_ids.clone())
    other.cand_ids[0, :, 1] = (other.cand_ids[0, :, 1] + 1) % 12
    logits, logits2 = grads(model, batch)[1], grads(model, other)[1]
    assert torch.allclose(logits[:, :, 0], logits2[:, :, 0], atol=1e-6)
    assert not torch.allclose(logits[:, :, 1], logits2[:, :, 1], atol=1e-6)


def test_a_longer_batch_mate_changes_a_rows_scores_through_n_alone(dataset: Dataset, model: nn.Module) -> None:
    batch = next(Loader(dataset, spec_with().data, seed=0).eval_batches())[0]
    logits = grads(model, batch)[1]
    assert not torch.allclose(logits, grads(model, batch._replace(n=batch.n * 2))[1], atol=1e-6)


def test_a_batch_of_dummies_has_loss_zero_and_gradients_of_zero(dataset: Dataset, model: nn.Module) -> None:
    batch, _ = Loader(dataset, spec_with().data, seed=0).train_batch(0)
    empty = Batch(*(torch.zeros_like(x) for x in batch))._replace(
        token_slot=torch.full_like(batch.token_slot, SLOTS),
        slot_token=torch.full_like(batch.slot_token, SLOTS),
        n=torch.tensor(1.0),
    )
    loss, _, grad = grads(model, empty)
    assert float(loss) == 0
    assert not any(value.any() for value in grad.values())


def test_the_same_seed_gives_the_same_bits_and_leaves_torchs_generator_alone(dataset: Dataset) -> None:
    state = torch.get_rng_state()
    first, second = (build_model(spec_with(), dataset.schema) for _ in range(2))
    other = build_model(
        spec_with().model_copy(update={"train": spec_with().train.model_copy(update={"seed": 1})}), dataset.schema
    )
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not a.numel() or a.dim() < 2 or "contextual_linear_bias" in name or not torch.equal(a, c), name


def test_dropout_is_absent_in_evaluation_and_draws_in_training(dataset: Dataset) -> None:
    spec = spec_with()
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"dropout": 0.3})})
    model = build_model(spec, dataset.schema)
    batch, _ = Loader(dataset, spec.data, seed=0).train_batch(0)
    assert not torch.equal(model(batch).logits, model(batch).logits)
    model.eval()
    assert torch.equal(model(batch).logits, model(batch).logits)


@pytest.mark.parametrize("budget", [None, 36])
def test_forward_and_backward_capture_as_one_graph_without_reading_a_value(
    dataset: Dataset, model: nn.Module, budget: int | None
) -> None:
    first, second = (Loader(dataset, spec_with(uih_budget=budget).data, seed=0).train_batch(s)[0] for s in (0, 5))
    names = [name for name, _ in model.named_parameters()]
    traced = copy.deepcopy(model)

    def step(params: list[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in zip(names, params, strict=True)}
        with stateless._reparametrize_module(traced, leaves):
            loss = traced(batch).loss
            loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves.values()]

    params = [p.detach() for p in model.parameters()]
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(params, first)
    targets = Counter(str(node.target) for node in graph.graph.nodes)
    banned = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bernoulli", "dropout", "_foreach")
    assert not [target for target in targets if any(word in target for word in banned)]
    loss, _, grad = grads(model, second)  # another batch than the one traced: nothing of the first may be baked in
    traced_loss, traced_grads = graph(params, second)
    assert torch.equal(loss, traced_loss)
    for name, value in zip(names, traced_grads, strict=True):
        assert (value is None) == (name not in grad)
        assert value is None or torch.allclose(value, grad[name], rtol=1e-5, atol=1e-7), name


def test_tables_larger_than_memory_are_refused_before_anything_is_allocated(dataset: Dataset) -> None:
    schema = dataset.schema.with_rows({"item_id": 2**31 - 1})
    with pytest.raises(TrainError, match="GiB") as error:
        build_model(validate_spec({"name": "t", "model": {"embedding_dim": 16384}}), schema)
    assert "data.rows.item_id" in error.value.remedy
