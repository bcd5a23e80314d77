"""Each module alone against the public one: 8 STU layers and their masks, positions, postprocessors, heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from twinstep.worker.models.config import STUConfig, TaskConfig
from twinstep.worker.models.heads import MultitaskModule
from twinstep.worker.models.layout import Layout
from twinstep.worker.models.positional import HSTUPositionalEncoder, positions, time_bucket
from twinstep.worker.models.postprocessor import (
    PERIODS,
    POSTPROCESSORS,
    TimestampLayerNormPostprocessor,
    time_features,
)
from twinstep.worker.models.stu import STULayer
from twinstep.worker.ops.hstu_attention import AttentionRule, attention_mask, fused

Fixture = dict[str, np.ndarray]
NUM_CONTEXTUAL = 2  # leading columns of the positional fixture that are contextual
STU_CASES = ["plain", "targets", "zero_targets", "contextual", "window", "ctx_window", "group_norm", "alpha"]


@pytest.fixture(scope="module")
def modules(npz: Callable[[str], Fixture]) -> Fixture:
    return npz("modules.npz")


def part(modules: Fixture, name: str) -> Fixture:
    found = {key.removeprefix(f"{name}/"): value for key, value in modules.items() if key.startswith(f"{name}/")}
    if not found:
        pytest.skip(f"{name} is left out of tests/golden/modules.npz; set TWINSTEP_FIXTURES to where all of it is")
    return found


def test_the_numbers_kept_here_are_the_public_ones(modules: Fixture) -> None:
    path = Path(__file__).parents[2] / "golden" / "modules.npz"
    assert path.stat().st_size <= 300_000
    with np.load(path, allow_pickle=False) as kept:
        assert len({key.split("/")[0] for key in kept.files if key.startswith("stu_")}) == 6
        assert all(np.array_equal(kept[key], modules[key]) for key in kept.files)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def load(module: nn.Module, fixture: Fixture) -> None:
    state = {k.removeprefix("params/"): tensor(v) for k, v in fixture.items() if k.startswith("params/")}
    module.load_state_dict(state)


def check_grads(module: nn.Module, fixture: Fixture) -> None:
    for name, param in module.named_parameters():
        assert param.grad is not None, name
        check_grad(param.grad, fixture[f"grads/{name}"])


def check_grad(ours: torch.Tensor | None, theirs: np.ndarray) -> None:
    assert ours is not None
    assert float((ours - tensor(theirs)).abs().max()) <= 1e-5 * max(float(np.abs(theirs).max()), 1e-6)


def make_layout(lengths: np.ndarray, targets: np.ndarray, *, spare: int) -> tuple[Layout, torch.Tensor]:
    """Return a layout of these rows, packed, with `spare` dummies; and where each jagged token stands in it, -1: none.

    Rows of our packed tokens: history tokens, dummies, then B*K candidate slots.
    """
    history = lengths - targets
    rows, slots, width = len(lengths), int(history.max()) + 1, max(int(targets.max()), 1)
    total = int(history.sum()) + spare
    token_slot, slot_token = torch.full((total,), rows * slots), torch.full((rows, slots), total)
    where: list[int] = []
    token = 0
    for b in range(rows):
        for j in range(int(history[b])):
            token_slot[token], slot_token[b, j] = b * slots + j, token
            where.append(token)
            token += 1
        where += [total + b * width + k for k in range(int(targets[b]))]
    layout = Layout(rows, 0, slots, width, total, token_slot, slot_token, tensor(history), tensor(targets))
    return layout, torch.tensor(where)


@pytest.mark.parametrize("name", STU_CASES)
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("as_one_op", [False, True])
def test_a_stu_layer_gives_the_public_output_and_gradients(
    modules: Fixture, name: str, spare: int, as_one_op: bool
) -> None:
    case = part(modules, f"stu_{name}")
    config = json.loads(str(case["config_json"]))
    lengths = case["lengths"]
    targets = case.get("num_targets", np.zeros_like(lengths))
    layer = STULayer(
        STUConfig(
            dim=config["embedding_dim"],
            num_heads=config["num_heads"],
            linear_dim=config["hidden_dim"],
            attention_dim=config["attention_dim"],
            group_norm=config.get("use_group_norm", False),
            alpha=config.get("attn_alpha"),
        )
    )
    load(layer, case)
    layout, where = make_layout(lengths, targets, spare=spare)
    rule = AttentionRule(
        layout.num_candidates,
        contextual_len=config.get("contextual_seq_len", 0),
        window=config.get("max_attn_len", 0),
        target_aware=config["target_aware"],
    )
    with fused(as_one_op):
        rows = layout.attention_rows(rule)
    jagged = tensor(case["x"]).requires_grad_()
    size = layout.num_tokens + layout.num_rows * layout.num_candidates
    # Dummies and empty slots hold noise: it must reach nothing.
    packed = torch.randn(size, jagged.shape[1], generator=torch.Generator().manual_seed(0)).index_put((where,), jagged)
    out = layer(packed, layout, rows, torch.tensor(float(config["max_seq_len"])))[where]
    assert float((out.detach() - tensor(case["y"])).abs().max()) <= 1e-5
    out.backward(tensor(case["dy"]))
    check_grad(jagged.grad, case["dx"])
    check_grads(layer, case)


@pytest.mark.parametrize("name", STU_CASES)
def test_the_mask_is_the_public_one_wherever_there_are_tokens(modules: Fixture, name: str) -> None:
    case = part(modules, f"stu_{name}")
    config = json.loads(str(case["config_json"]))
    lengths = tensor(case["lengths"])
    columns = torch.arange(config["max_seq_len"]).expand(len(lengths), -1)
    mask = attention_mask(
        columns,
        columns < lengths[:, None],
        lengths - tensor(case["num_targets"]) if config["target_aware"] else None,
        AttentionRule(0, contextual_len=config.get("contextual_seq_len", 0), window=config.get("max_attn_len", 0)),
    )
    theirs = tensor(case["mask"]).expand_as(mask)
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(mask[b, :length, :length], theirs[b, :length, :length])
        assert not mask[b, length:].any()
        assert not mask[b, :, length:].any()


def test_positions_and_times_are_encoded_as_the_public_encoder_does(modules: Fixture) -> None:
    case = part(modules, "positional")
    lengths, targets, times = tensor(case["lengths"]), tensor(case["num_targets"]), tensor(case["timestamps"])
    weights = case["params/_position_embeddings_weight"], case["params/_timestamp_embeddings_weight"]
    encoder = HSTUPositionalEncoder(weights[0].shape[1], position_rows=len(weights[0]), time_rows=len(weights[1]))
    load(encoder, case)
    place, ages, start = [], [], 0
    for length, target in zip(lengths.tolist(), targets.tolist(), strict=True):
        columns = torch.arange(length)[None]
        place.append(positions(columns, torch.tensor([[length - target]]), NUM_CONTEXTUAL)[0])
        ages.append(times[start + length - 1] - times[start : start + length])
        start += length
    x = tensor(case["x"]).requires_grad_()
    out = encoder(x, torch.cat(place), torch.cat(ages))
    assert float((out.detach() - tensor(case["y"])).abs().max()) <= 1e-5
    out.backward(tensor(case["dy"]))
    check_grads(encoder, case)
    check_grad(x.grad, case["dx"])


def test_the_timestamp_postprocessor_gives_the_public_numbers(modules: Fixture) -> None:
    case = part(modules, "post_timestamp")
    seconds = tensor(case["timestamps"]).to(torch.float32)
    # The public module buckets in float32, which goes wrong on the row in milliseconds; give ours the same buckets.
    hour, day = (torch.div(seconds, unit, rounding_mode="floor") % count for unit, count in PERIODS)
    times = (day * 86400 + hour * 3600).to(torch.int64)
    module = TimestampLayerNormPostprocessor(case["x"].shape[1])
    load(module, case)
    x = tensor(case["x"]).requires_grad_()
    out = module(x, times)
    assert float((out.detach() - tensor(case["y"])).abs().max()) <= 1e-5
    out.backward(tensor(case["dy"]))
    check_grad(x.grad, case["dx"])
    check_grads(module, case)


@pytest.mark.parametrize("name", ["layer_norm", "l2_norm"])
def test_the_postprocessors_without_time_give_the_public_numbers(modules: Fixture, name: str) -> None:
    case = part(modules, {"l2_norm": "post_l2"}.get(name, f"post_{name}"))
    module = POSTPROCESSORS[name](case["x"].shape[1])
    load(module, case)
    x = tensor(case["x"]).requires_grad_()
    out = module(x, tensor(case["timestamps"]))
    assert float((out.detach() - tensor(case["y"])).abs().max()) <= 1e-5
    out.backward(tensor(case["dy"]))
    check_grad(x.grad, case["dx"])
    check_grads(module, case)


def test_heads_with_a_regression_and_a_task_without_weight_give_the_public_losses(modules: Fixture) -> None:
    case = part(modules, "heads")
    config = json.loads(str(case["config_json"]))
    kinds = {"BINARY_CLASSIFICATION": "binary", "REGRESSION": "regression"}
    tasks = [TaskConfig(name=t["task_name"], kind=kinds[t["task_type"]]) for t in config["tasks"]]
    user, item = (tensor(case[key]).requires_grad_() for key in ("user", "item"))
    heads = MultitaskModule(
        tasks, dim=user.shape[1], hidden_dim=config["hidden"], loss_weight=config["causal_multitask_weights"]
    )
    load(heads, case)
    logits = heads(user, item)
    predictions = torch.cat((torch.sigmoid(logits[:2]), logits[2:]))
    losses = heads.losses(logits, tensor(case["labels"]), tensor(case["weights"]))
    assert torch.allclose(predictions, tensor(case["preds"]), atol=1e-6)
    assert torch.allclose(losses, tensor(case["losses"]), rtol=1e-5, atol=1e-7)
    losses.sum().backward()
    check_grads(heads, case)
    check_grad(user.grad, case["duser"])
    check_grad(item.grad, case["ditem"])


def test_time_buckets_are_exact_at_every_edge() -> None:
    roots = torch.arange(1, 2050)
    edges = roots * roots * 60
    assert torch.equal(time_bucket(edges, 4096), roots)
    assert torch.equal(time_bucket(edges - 1, 4096), roots - 1)
    assert torch.equal(time_bucket(edges.to(torch.int32), 4096), roots.to(torch.int32))
    assert time_bucket(torch.tensor([-5, 0, 59, 2**31 - 1]), 2049).tolist() == [0, 0, 0, 2048]


def test_hours_and_weekdays_turn_over_at_the_whole_second() -> None:
    around = torch.tensor([1_650_002_399, 1_650_002_400])  # 05:59:59 and 06:00:00 UTC
    hour = torch.atan2(*time_features(around)[:, [1, 0]].T) / (2 * 3.14) * 24
    assert torch.allclose(hour, torch.tensor([5.0, 6.0]), atol=1e-3)
