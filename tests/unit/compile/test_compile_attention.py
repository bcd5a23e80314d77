"""HSTU attention through the compiler: one node on both backends, plain ATen where asked for, and eager's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile.lower import xla_attention
from twinstep.worker.compile.step_compiler import StepCompiler
from twinstep.worker.ops import native
from twinstep.worker.ops.hstu_attention import (
    OPERATOR,
    OPERATOR_BACKWARD,
    AttentionRule,
    attention_rows,
    hstu_attention,
    reference,
    reference_backward,
)

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
B, S, H, A, V = 3, 12, 2, 8, 8
RULES = [
    AttentionRule(3),
    AttentionRule(3, window=2),
    AttentionRule(3, window=1, full_len=2),
    AttentionRule(3, contextual_len=2),
    AttentionRule(0, contextual_len=1, window=4, target_aware=False),
]


def inputs(rule: AttentionRule, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    arrays = [torch.randn(B, S, H, width).to(dtype) for width in (V, A, A, V)]
    targets = torch.tensor([3, 1, 0]).clamp(max=rule.num_targets)
    return arrays, (torch.tensor([S - rule.num_targets, 4, 0]), targets, torch.tensor(9.0))


def on_jax(tensor: Tensor) -> jax.Array:
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.numpy())


def both(
    platform: str, arrays: list[Tensor], rest: tuple[Tensor, ...], rule: AttentionRule
) -> list[np.ndarray[Any, Any]]:
    """Return output and gradients of the lowering for a platform, under jit."""
    options = (rule.num_targets, rule.contextual_len, rule.window, rule.target_aware, rule.full_len, 0.4)

    def run(grad: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        return xla_attention.forward(*given, *options), *xla_attention.backward(grad, *given, *options)

    with xla_attention.platform(platform):
        found = jax.jit(run)(*(on_jax(x) for x in (*arrays, *rest)))
    return [np.asarray(x.astype(jnp.float32)) for x in found]


@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=needs_compiler), "reference"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_xla_gives_the_references_numbers(platform: str, rule: AttentionRule) -> None:
    arrays, rest = inputs(rule)
    want = (reference(*arrays[1:], *rest, rule, 0.4), *reference_backward(*arrays, *rest, rule, 0.4))
    for ours, theirs in zip(both(platform, arrays, rest, rule), want, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)


@needs_compiler
def test_xla_on_the_cpu_takes_bfloat16() -> None:
    arrays, rest = inputs(RULES[0], torch.bfloat16)
    wide = [x.float() for x in arrays]
    want = (reference(*wide[1:], *rest, RULES[0], 0.4), *reference_backward(*wide, *rest, RULES[0], 0.4))
    for ours, theirs in zip(both("cpu", arrays, rest, RULES[0]), want, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2.0**-8, atol=2e-3)


@needs_compiler
def test_the_kernel_is_in_xlas_program_and_no_scores_are() -> None:
    arrays, rest = inputs(RULES[0])
    given = [on_jax(x) for x in (*arrays[1:], *rest)]

    def text(platform: str) -> str:
        with xla_attention.platform(platform):
            return (
                jax.jit(lambda *x: xla_attention.forward(*x, 3, 0, 0, True, 0, 0.4)).lower(*given).compile().as_text()
            )

    assert "twinstep_hstu_attention" in text("cpu")
    assert f"f32[{B},{H},{S},{S}]" not in text("cpu")
    assert f"f32[{B},{H},{S},{S}]" in text("reference")


SPREAD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from twinstep.worker.compile.lower import xla_attention
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
rng = np.random.default_rng(0)
B, S, H, W = 8, 12, 2, 8
arrays = [rng.standard_normal((B, S, H, W), dtype=np.float32) for _ in range(4)]
rest = (np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32) % 4, np.float32(9))
def run(grad, *given):
    options = (4, 0, 0, True, 0, 0.4)
    return xla_attention.forward(*given, *options), *xla_attention.backward(grad, *given, *options)
def spread(x, names):
    return jax.device_put(x, NamedSharding(mesh, P(*names)))
for wide in (("x",), ("x", None, "y"), ("x", "y"), ()):
    row = wide[:1]
    given = [spread(x, wide) for x in arrays] + [spread(rest[0], row), spread(rest[1], row), spread(rest[2], ())]
    compiled = jax.jit(run).lower(*given).compile()
    text = compiled.as_text()
    assert "twinstep_hstu_attention" in text
    if wide in (("x",), ("x", None, "y")):
        local = f"f32[{B // 4},{S},{H // 2 if 'y' in wide else H},{W}]"
        assert local in text, (local, text)
        assert "all-gather" not in text, text
    with xla_attention.platform("reference"):
        want = jax.jit(lambda *x: run(*x))(*arrays, *rest)
    for ours, theirs in zip(compiled(*given), want):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-6)
print("equal")
"""


@needs_compiler
def test_rows_and_heads_are_spread_over_devices_without_gathering() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", SPREAD],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert found.stdout.strip() == "equal", found.stderr[-2000:]


class Attends(nn.Module):
    """The least model with attention: one product gives q, k and v."""

    def __init__(self, rule: AttentionRule) -> None:
        super().__init__()
        self.mix = nn.Linear(6, H * (2 * A + V))
        self._rule = rule

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = attention_rows(batch["prefix"], batch["targets"], num_slots=S, rule=self._rule)
        q, k, v = (x.unflatten(2, (H, -1)) for x in self.mix(batch["x"]).split([H * A, H * A, H * V], dim=2))
        return hstu_attention(q, k, v, rows, batch["n"], alpha=0.4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = (model(batch) - 0.1).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def trained(backend: Any, rule: AttentionRule, **options: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    torch.manual_seed(1)
    model = Attends(rule)
    compiler = StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.05), backend=backend, **options)
    losses = []
    for number in range(3):
        torch.manual_seed(number)
        _, (prefix, targets, n) = inputs(rule)
        x = torch.randn(B, S, 6)
        losses.append(float(compiler({"x": x, "prefix": prefix, "targets": targets, "n": n}).detach()))
    compiler.pull()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, compiler


def captured(compiler: StepCompiler) -> Any:
    return next(iter(compiler._runners.values())).captured


@needs_compiler
@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=str)
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "xla"])
def test_a_compiled_step_holds_one_node_each_way_and_equals_eager(backend: str, rule: AttentionRule) -> None:
    losses, parameters, compiler = trained(backend, rule)
    want_losses, want, _ = trained("eager", rule)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    for name, each in want.items():
        torch.testing.assert_close(parameters[name], each, rtol=1e-5, atol=1e-6)
    found = captured(compiler)
    targets = [node.target for node in found.graph.graph.nodes]
    assert (targets.count(OPERATOR), targets.count(OPERATOR_BACKWARD)) == (1, 1)
    assert found.context.notes["fused_attention"] == {"nodes": 2, "score_bytes": 2 * B * H * S * S * 4}


@pytest.mark.parametrize("why", ["not asked for", "no compiler"])
@pytest.mark.inductor
def test_without_the_strategy_or_a_compiler_the_step_is_plain(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no compiler":
        monkeypatch.setattr("twinstep.worker.compile.passes.fused_attention.find_compiler", lambda: None)
    losses, _, compiler = trained("inductor", RULES[0], **({"strategies": []} if why == "not asked for" else {}))
    assert losses == pytest.approx(trained("eager", RULES[0])[0], rel=1e-5)
    found = captured(compiler)
    assert OPERATOR not in {node.target for node in found.graph.graph.nodes}
    if why == "no compiler":
        assert "compiler" in found.context.notes["fused_attention"]
