"""The public numbers through the compiler: every single module in one step, and the whole model, on both backends.

And the whole model on the public loader's millisecond clock, eager, where the one departure is the buckets of time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.worker.data.batch import Batch
from twinstep.worker.models import postprocessor
from twinstep.worker.models.config import DLRMv3Config, STUConfig, TaskConfig
from twinstep.worker.models.dlrmv3 import DLRMv3
from twinstep.worker.models.heads import MultitaskModule
from twinstep.worker.models.layout import Layout
from twinstep.worker.models.positional import HSTUPositionalEncoder, positions
from twinstep.worker.models.postprocessor import PERIODS, POSTPROCESSORS
from twinstep.worker.models.stu import STULayer
from twinstep.worker.ops.hstu_attention import AttentionRule

Fixture = dict[str, np.ndarray]
Backend = Literal["inductor", "xla"]
BACKENDS = ["xla", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
STU = ["plain", "targets", "zero_targets", "contextual", "window", "ctx_window", "group_norm", "alpha"]
POST = {"timestamp": "post_timestamp", "layer_norm": "post_layer_norm", "l2_norm": "post_l2"}
NUM_CONTEXTUAL = 2  # leading columns of the positional fixture that are contextual
SGD_LR = 0.1  # with which the fixture's step was made


class Padded(nn.Module):
    """An STU layer over the fixture's rows, each row in slots of its own: history first, then targets."""

    def __init__(self, case: Fixture) -> None:
        super().__init__()
        config = json.loads(str(case["config_json"]))
        self.layer = STULayer(
            STUConfig(
                dim=config["embedding_dim"],
                num_heads=config["num_heads"],
                linear_dim=config["hidden_dim"],
                attention_dim=config["attention_dim"],
                group_norm=config.get("use_group_norm", False),
                alpha=config.get("attn_alpha"),
            )
        )
        lengths = torch.from_numpy(case["lengths"].copy())
        targets = torch.from_numpy(case.get("num_targets", np.zeros_like(case["lengths"])).copy())
        history = lengths - targets
        B, U, K = len(lengths), int(history.max()), max(int(targets.max()), 1)
        filled = torch.arange(U) < history[:, None]
        slots = torch.where(filled, torch.arange(B * U).reshape(B, U), B * U)
        self.layout = Layout(B, 0, U, K, B * U, slots.flatten(), slots, history, targets)
        self.where = torch.cat([
            b * (U + K) + torch.cat([torch.arange(int(history[b])), U + torch.arange(int(targets[b]))])
            for b in range(B)
        ])  # fmt: skip
        self.rule = AttentionRule(
            K,
            contextual_len=config.get("contextual_seq_len", 0),
            window=config.get("max_attn_len", 0),
            target_aware=config["target_aware"],
        )
        self.n = float(config["max_seq_len"])
        self.size = B * (U + K)

    def forward(self, x: Tensor) -> Tensor:
        packed = x.new_zeros(self.size, x.shape[1]).index_copy(0, self.where, x)
        layout_rows = self.layout.attention_rows(self.rule)
        return self.layer(packed, self.layout, layout_rows, torch.full((), self.n)).index_select(0, self.where)


class Positional(nn.Module):
    def __init__(self, case: Fixture) -> None:
        super().__init__()
        place, time = (case[f"params/_{name}_embeddings_weight"] for name in ("position", "timestamp"))
        self.layer = HSTUPositionalEncoder(place.shape[1], position_rows=len(place), time_rows=len(time))
        index, ages, start = [], [], 0
        for length, target in zip(case["lengths"].tolist(), case["num_targets"].tolist(), strict=True):
            own = torch.from_numpy(case["timestamps"][start : start + length].copy())
            high = torch.tensor([[length - target]])
            index.append(positions(torch.arange(length)[None], high, NUM_CONTEXTUAL)[0])
            ages.append(own[-1] - own)
            start += length
        self.index, self.ages = torch.cat(index), torch.cat(ages)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.index, self.ages)


class Post(nn.Module):
    def __init__(self, kind: str, case: Fixture) -> None:
        super().__init__()
        self.layer = POSTPROCESSORS[kind](case["x"].shape[1])
        seconds = torch.from_numpy(case["timestamps"].copy()).to(torch.float32)
        # The public module buckets in float32, which goes wrong on its row in milliseconds: give ours the same buckets.
        hour, day = (torch.div(seconds, unit, rounding_mode="floor") % count for unit, count in PERIODS)
        self.times = (day * 86400 + hour * 3600).to(torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.times)


class Heads(nn.Module):
    def __init__(self, case: Fixture) -> None:
        super().__init__()
        config = json.loads(str(case["config_json"]))
        kinds = {"BINARY_CLASSIFICATION": "binary", "REGRESSION": "regression"}
        tasks = [TaskConfig(name=t["task_name"], kind=kinds[t["task_type"]]) for t in config["tasks"]]
        dim, weight = case["user"].shape[1], config["causal_multitask_weights"]
        self.layer = MultitaskModule(tasks, dim=dim, hidden_dim=config["hidden"], loss_weight=weight)
        self.item, self.labels, self.weights = (
            torch.from_numpy(case[name].copy()) for name in ("item", "labels", "weights")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.losses(self.layer(x, self.item), self.labels, self.weights)


class Everything(nn.Module):
    """All modules side by side, each with a zero added to its input, whose gradient is the input's."""

    def __init__(self, cases: dict[str, Fixture]) -> None:
        super().__init__()
        made: dict[str, nn.Module] = {f"stu_{name}": Padded(cases[f"stu_{name}"]) for name in STU}
        made |= {"positional": Positional(cases["positional"]), "heads": Heads(cases["heads"])}
        made |= {key: Post(kind, cases[key]) for kind, key in POST.items()}
        self.parts = nn.ModuleDict(made)
        for name, module in made.items():
            state = {k.removeprefix("params/"): torch.from_numpy(v.copy()) for k, v in cases[name].items()
                     if k.startswith("params/")}  # fmt: skip
            module.layer.load_state_dict(state)
        self.shifts = nn.ParameterDict({name: torch.zeros_like(x) for name, x in inputs(cases).items()})

    def forward(self, batch: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: part(batch["x"][name] + self.shifts[name]) for name, part in self.parts.items()}


def inputs(cases: dict[str, Fixture]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(case["user" if name == "heads" else "x"].copy()) for name, case in cases.items()}


def step(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    found = model(batch)
    torch.stack([(y * batch["dy"][name]).sum() for name, y in found.items()]).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return {name: y.detach() for name, y in found.items()}, gradients


def close(ours: Tensor, theirs: np.ndarray, name: str) -> None:
    """Compare to within 1e-5 of the largest value."""
    error = float(np.abs(ours.detach().numpy().astype(np.float64) - theirs).max(initial=0))
    assert error <= 1e-5 * max(float(np.abs(theirs).max(initial=0)), 1e-6), f"{name}: {error:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_module_compiled_gives_the_public_outputs_and_gradients(
    npz: Callable[[str], Fixture], backend: Backend
) -> None:
    modules = npz("modules.npz")
    names = [*(f"stu_{name}" for name in STU), "positional", "heads", *POST.values()]
    cases = {
        name: {k.removeprefix(f"{name}/"): v for k, v in modules.items() if k.startswith(f"{name}/")} for name in names
    }
    if not all(cases.values()):
        pytest.skip("tests/golden/modules.npz holds a part of the modules; set TWINSTEP_FIXTURES to all of them")
    model = Everything(cases)
    dy = {name: torch.from_numpy(case["dy"].copy()) for name, case in cases.items() if name != "heads"}
    batch = {"x": inputs(cases), "dy": dy | {"heads": torch.ones(3)}}
    runner = twinstep.compile(step, model, torch.optim.SGD(model.parameters(), lr=1e-3), batch, target=backend)
    found, gradients = runner(batch)
    for name, case in cases.items():
        close(found[name], case["losses" if name == "heads" else "y"], name)
        close(gradients[f"shifts.{name}"], case["duser" if name == "heads" else "dx"], f"{name} input")
        for key, value in case.items():
            if key.startswith("grads/"):
                parameter = key.removeprefix("grads/")
                close(gradients[f"parts.{name}.layer.{parameter}"], value, f"{name} {parameter}")


def public(fixture: Fixture) -> dict[str, Tensor]:
    return {
        key.partition("/")[2]: torch.from_numpy(value.copy())
        for key, value in fixture.items()
        if key.startswith(("params/", "buffers/"))
    }


def train_step(model: Any, optimizer: Any, batch: Batch) -> Any:
    optimizer.zero_grad()
    output = model(batch)
    output.loss.backward()
    optimizer.step()
    return output


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_model_compiled_gives_the_public_losses_predictions_and_parameters(
    kuairand: Fixture, kuairand_config: DLRMv3Config, kuairand_batch: Callable[..., Batch], backend: Backend
) -> None:
    model = DLRMv3.from_generative_recommenders(public(kuairand), kuairand_config)
    batch = kuairand_batch(0, slots=37, tokens=80, num_candidates=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_LR)
    runner = twinstep.compile(train_step, model, optimizer, batch, target=backend)
    output = runner(batch)
    valid = torch.arange(4) < batch.num_candidates[:, None]
    close(torch.sigmoid(output.logits.detach()[:, valid]), kuairand["out/preds"], "predictions")
    close(output.loss, kuairand["out/total"], "loss")
    for task, loss in zip(kuairand_config.tasks, output.task_losses, strict=True):
        close(loss, kuairand[f"out/loss/{task.name}"], task.name)
    runner.pull()
    for name, parameter in model.named_parameters():
        close(parameter, kuairand[f"sgd1/{name}"], name)


def float_features(times_R: Tensor) -> Tensor:
    """Hour and weekday as the public code has them: times cast to float32 before they are bucketed."""
    units = torch.tensor([[float(seconds) for seconds, _ in PERIODS]])
    counts = torch.tensor([[float(count) for _, count in PERIODS]])
    share = torch.floor(times_R.to(torch.float32).unsqueeze(1) / units) % counts / counts
    angle = share * 2 * 3.14
    return torch.stack((torch.cos(angle), torch.sin(angle)), dim=2).flatten(1)


def test_on_the_public_loaders_millisecond_clock_the_buckets_of_time_are_the_only_departure(
    npz: Callable[[str], Fixture],
    kuairand_config: DLRMv3Config,
    kuairand_batch_of: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = npz("kuairand_1k.npz")
    model = DLRMv3.from_generative_recommenders(public(fixture), kuairand_config)
    batch = kuairand_batch_of(fixture, 0, slots=37, tokens=80, num_candidates=4)
    valid = torch.arange(4) < batch.num_candidates[:, None]
    ours = torch.sigmoid(model(batch).logits.detach()[:, valid]).numpy()
    assert np.abs(ours - fixture["out/preds"]).max() > 1e-4  # whole milliseconds are no seconds: another hour
    monkeypatch.setattr(postprocessor, "time_features", float_features)
    output = model(batch)
    output.loss.backward()
    close(torch.sigmoid(output.logits[:, valid]), fixture["out/preds"], "predictions")
    close(output.loss, fixture["out/total"], "loss")
    unused = set(fixture["unused_params"].tolist())
    for name, parameter in model.named_parameters():
        if name not in unused:
            assert parameter.grad is not None
            close(parameter.grad, fixture[f"grads/{name}"], name)
