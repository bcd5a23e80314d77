"""Mixed precision, the user's own autocast, and simulated quantization, each against eager PyTorch."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinstep
from twinstep.spec.errors import CaptureError, CompileError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.strategies import MixedPrecision, Quantize

BACKENDS = ("inductor", "xla")

TOLERANCES: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative error of losses, by the dtype that products read, against eager in the same dtype.

bfloat16 keeps 8 bits: two programs that round at other places differ by 2⁻⁸ = 0.004 a product.
"""


class Net(nn.Module):
    """A table, a block of attention with softmax, norms, a tied weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(17, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 3.0, dim=-1) @ v
        return (self.head(self.norm(torch.sigmoid(self.head(x)))) * x).mean(dim=(1, 2))


def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch["ids"]), batch["target"])
    loss.backward()
    optimizer.step()
    return loss


def autocast_step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch["ids"]).float(), batch["target"])
    loss.backward()
    optimizer.step()
    return loss


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(17, (4, 6), generator=generator),
            "target": torch.randint(2, (4,), generator=generator).float(),
        }
        for _ in range(count)
    ]


def train(backend: str, train_step: Any, strategies: Any = (), steps: int = 6) -> tuple[Net, list[float], Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    compiler = StepCompiler(train_step, model, optimizer, backend=backend, strategies=strategies)  # type: ignore[arg-type]
    losses = [float(compiler(batch)) for batch in batches(steps)]
    compiler.pull()
    runner = None if backend == "eager" else compiler.runner(batches(1)[0])
    return model, losses, runner


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_precision_follows_eager_autocast_within_the_dtypes_tolerance(backend: str) -> None:
    _, wide, _ = train("eager", step)
    want_model, want, _ = train("eager", autocast_step)
    model, losses, runner = train(backend, step, [MixedPrecision()])
    assert losses == pytest.approx(want, rel=TOLERANCES[torch.bfloat16])
    assert losses != pytest.approx(wide, rel=1e-7), "nothing was rounded"
    for name, value in model.named_parameters():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, want_model.get_parameter(name), rtol=0.05, atol=0.02)
    nodes = runner.captured.graph.graph.nodes
    products = [node for node in nodes if "mm" in str(node.target)]
    assert len(products) == 3 * 5
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    narrow = [n for n in nodes if n.op == "call_function" and getattr(n.meta["val"], "dtype", None) is torch.bfloat16]
    moves = ("mm", "view", "permute", "transpose", "expand", "convert", "_to_copy", "clone", "squeeze", "t.default")
    assert not [n for n in narrow if not any(move in str(n.target) for move in moves)], "only products are narrow"
    casts = [node for node in narrow if "convert" in str(node.target) or "_to_copy" in str(node.target)]
    assert len({node.args[0] for node in casts}) == len(casts), "a value is cast once"
    assert runner.captured.context.notes["mixed_precision"] == {"products": 15, "values cast": len(casts)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_users_own_autocast_is_captured(backend: str) -> None:
    _, want, _ = train("eager", autocast_step)
    _, losses, runner = train(backend, autocast_step)
    assert losses == pytest.approx(want, rel=TOLERANCES[torch.bfloat16])
    products = [node for node in runner.captured.graph.graph.nodes if "mm" in str(node.target)]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


class MasterSGD(torch.optim.Optimizer):
    """SGD on float32 copies of bfloat16 parameters, made when it is built, as mixed-precision trainers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["master"] = parameter.detach().float().clone()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state[parameter]["master"]
                master.sub_(parameter.grad.float() * group["lr"])
                parameter.copy_(master)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_parameters_with_master_copies_follow_eager(backend: str) -> None:
    def master_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = {}
    for each in ("eager", backend):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(torch.bfloat16)
        optimizer = MasterSGD(model.parameters(), lr=1e-3)  # one update is less than bfloat16 can tell
        compiler = StepCompiler(master_step, model, optimizer, backend=each)  # type: ignore[arg-type]
        for _ in range(20):
            compiler(torch.ones(2, 4, dtype=torch.bfloat16))
        compiler.pull()
        assert model.weight.dtype is torch.bfloat16
        found[each] = optimizer.state[model.weight]["master"].clone()
        assert found[each].dtype is torch.float32
    torch.testing.assert_close(found[backend], found["eager"], rtol=1e-2, atol=1e-4)


def test_a_gradient_scaler_is_refused_with_what_to_do() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match="GradScaler") as caught:
        twinstep.compile(scaled, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4), target="xla")
    assert "bfloat16" in caught.value.remedy


def on_grid(x: Tensor, wanted: Quantize) -> Tensor:
    """Round by hand, gradient straight through."""
    width = (wanted.high - wanted.low) / (wanted.num_buckets - 1)
    points = wanted.low + width * torch.arange(wanted.num_buckets)
    nearest = (x.detach()[..., None] - points).abs().argmin(dim=-1)
    return x + (points[nearest] - x).detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("patterns", [(), ("table.*", "head.weight"), ("*",)], ids=["tables", "two", "all"])
def test_quantization_follows_one_by_hand(patterns: tuple[str, ...], backend: str) -> None:
    if backend == "inductor" and patterns != ("*",):
        pytest.skip("all patterns at once say as much")
    wanted = Quantize(num_buckets=12, low=-1.0, high=0.5, parameters=patterns)
    chosen = patterns or ("table.weight",)

    def by_hand(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        read = {
            name: on_grid(value, wanted) if any(fnmatch.fnmatch(name, each) for each in chosen) else value
            for name, value in model.named_parameters()
        }
        logits = torch.func.functional_call(model, read, (batch["ids"],))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["target"])
        loss.backward()
        optimizer.step()
        return loss

    want_model, want, _ = train("eager", by_hand, steps=4)
    model, losses, runner = train(backend, step, [wanted], steps=4)
    assert losses == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(model.state_dict(), want_model.state_dict(), rtol=1e-5, atol=1e-6)
    assert losses != pytest.approx(train("eager", step, steps=4)[1], rel=1e-4), "nothing was rounded"
    assert not torch.equal(on_grid(model.table.weight, wanted), model.table.weight), "the update keeps every digit"
    if not patterns:
        rows = [n for n in runner.captured.graph.graph.nodes if "round" in str(n.target)]
        assert [tuple(node.meta["val"].shape) for node in rows] == [(4, 6, 8)], "rows are rounded, never the table"


def test_the_grid_is_torchs_fake_quantize() -> None:
    model, x = nn.Linear(16, 1, bias=False), torch.eye(16)
    wanted = Quantize(num_buckets=256, low=-1.28, high=1.27, parameters=("weight",))
    model.weight.data.uniform_(-1.5, 1.5)

    def read(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    got = StepCompiler(read, model, None, backend="xla", strategies=[wanted])(x)[:, 0]
    want = torch.fake_quantize_per_tensor_affine(model.weight.detach()[0], 0.01, 0, -128, 127)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_buckets": 1}, "num_buckets is 1"),
        ({"low": 1.0, "high": 1.0}, "low is 1.0"),
        ({"high": float("inf")}, "high inf"),
    ],
)
def test_a_grid_that_is_none_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(CompileError, match=words):
        Quantize(**settings)


def test_a_pattern_that_names_no_parameter_is_refused_with_the_names() -> None:
    model = nn.Linear(4, 4)
    for wanted, words in ((Quantize(parameters=("tabel*",)), r"'tabel\*'"), (Quantize(), "no embedding table")):
        with pytest.raises(CompileError, match=words) as caught:
            StepCompiler(lambda m, x: m(x), model, None, backend="xla", strategies=[wanted])(torch.ones(2, 4))
        assert "weight, bias" in caught.value.remedy
