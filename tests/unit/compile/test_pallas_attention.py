"""The TPU kernels of HSTU attention: interpreted against plain PyTorch, and compiled by libtpu for each generation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu

from twinstep.worker.compile.lower import pallas_attention
from twinstep.worker.compile.lower.pallas_attention import Walk, backward, block_size, forward
from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward, slot_mask, slot_valid

ALPHA = 0.3
RULES = [
    AttentionRule(4),
    AttentionRule(4, target_aware=False),
    AttentionRule(4, contextual_len=3),
    AttentionRule(4, window=5),
    AttentionRule(4, contextual_len=3, window=5),
    AttentionRule(0, contextual_len=2, window=3),
    AttentionRule(4, contextual_len=3, window=2, full_len=4),
    AttentionRule(4, window=2, target_aware=False, full_len=3),
    AttentionRule(4, contextual_len=2, window=7, target_aware=False),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 slots, so that short rows have several."""
    monkeypatch.setattr(pallas_attention, "LARGEST_BLOCK", 128)


def arrays(B: int, S: int, H: int, A: int, V: int, rule: AttentionRule, prefix: list[int], targets: list[int]) -> Any:
    """Return (grad, q, k, v, prefix, targets, n) with NaN wherever no token stands."""
    generator = torch.Generator().manual_seed(S)
    grad, q, k, v = (torch.randn(B, S, H, width, generator=generator) for width in (V, A, A, V))
    lengths = torch.tensor(prefix), torch.tensor(targets)
    for each in (grad, q, k, v):
        each[~slot_valid(*lengths, S, rule.num_targets)] = float("nan")
    return grad, q, k, v, *lengths, torch.tensor(float(S - 2))


def to_jax(values: Any) -> list[Any]:
    return [jnp.asarray(each.numpy()) for each in values]


def check(inputs: Any, rule: AttentionRule, tolerance: float = 2e-6) -> None:
    grad, *rest = inputs
    ours = [
        forward(*to_jax(rest), rule, ALPHA, interpret=True),
        *backward(*to_jax(inputs), rule, ALPHA, interpret=True),
    ]
    theirs = [reference(*rest, rule, ALPHA), *reference_backward(grad, *rest, rule, ALPHA)]
    for name, found, expected in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        gap = np.abs(np.asarray(found) - expected.numpy()).max()
        assert gap <= tolerance * max(float(expected.abs().max()), 1e-6), (name, gap)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_one_block_equals_plain_pytorch(rule: AttentionRule) -> None:
    check(arrays(3, 21, 2, 8, 16, rule, [17, 9, 0], [4, 2, 0]), rule)


@pytest.mark.parametrize("rule", [RULES[0], RULES[4], RULES[6]], ids=str)
def test_several_blocks_the_last_one_short_equal_plain_pytorch(rule: AttentionRule, small_blocks: None) -> None:
    check(arrays(2, 300, 1, 8, 8, rule, [296, 150], [4, 1]), rule)


def test_heads_that_fill_registers_are_read_where_they_are(small_blocks: None) -> None:
    check(arrays(1, 140, 2, 128, 128, RULES[0], [136], [4]), RULES[0])


@pytest.mark.parametrize("rule", [RULES[0], RULES[4]], ids=str)
def test_totals_are_the_sums_of_the_gradients_over_a_rows_slots(rule: AttentionRule, small_blocks: None) -> None:
    inputs = to_jax(arrays(2, 300, 2, 8, 16, rule, [296, 150], [4, 1]))
    *grads, dq, dk, dv = backward(*inputs, rule, ALPHA, totals=True, interpret=True)
    for grad, plain, total in zip(grads, backward(*inputs, rule, ALPHA, interpret=True), (dq, dk, dv), strict=True):
        np.testing.assert_array_equal(grad, plain)
        expected = np.asarray(grad, np.float64).sum(1)[:, :, None]
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_half_precision_sums_in_float32() -> None:
    rule = RULES[0]
    inputs = [each.nan_to_num() for each in arrays(2, 40, 2, 8, 8, rule, [36, 20], [4, 2])]
    narrow = [each.astype(jnp.bfloat16) if each.ndim == 4 else each for each in to_jax(inputs)]
    out = forward(*narrow[1:], rule, ALPHA, interpret=True)
    assert out.dtype == jnp.bfloat16
    expected = reference(*inputs[1:], rule, ALPHA)
    assert np.abs(np.asarray(out, np.float32) - expected.numpy()).max() <= 2e-2 * float(expected.abs().max())


def test_what_is_beyond_a_row_reaches_nothing(small_blocks: None) -> None:
    rule = AttentionRule(4)
    inputs = arrays(1, 150, 1, 8, 8, rule, [100], [3])
    out = forward(*to_jax(inputs[1:]), rule, ALPHA, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    assert np.abs(np.asarray(out) - reference(*inputs[1:], rule, ALPHA).numpy()).max() <= 1e-5


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("prefix", "targets"), [(60, 4), (33, 2), (5, 0), (0, 3), (0, 0)])
def test_no_block_is_left_out_in_which_somebody_sees_somebody(rule: AttentionRule, prefix: int, targets: int) -> None:
    S, block = 64, 8
    if prefix > S - rule.num_targets:
        pytest.skip("no such row")
    walk = Walk(S, block, rule, ALPHA)
    mask = slot_mask(torch.tensor([prefix]), torch.tensor([targets]), S, rule)[0]
    blocks = mask.reshape(S // block, block, S // block, block).any(dim=3).any(dim=1)
    visited = torch.tensor(
        [[bool(walk.seen(i, j, prefix, targets)) for j in range(S // block)] for i in range(S // block)]
    )
    assert not (blocks & ~visited).any()
    if rule == AttentionRule(4):
        assert int(visited.sum()) <= int(blocks.sum()) + 8  # and few of the others are visited


def test_blocks_are_few_and_leave_little_over() -> None:
    assert [block_size(S) for S in (21, 256, 300, 522, 1034, 8202)] == [21, 256, 384, 384, 384, 512]


_COMPILE = """
import os
from twinstep.worker.compile.aot import ENVIRONMENT
os.environ.update(ENVIRONMENT)
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.lower import pallas_attention as kernels
from twinstep.worker.compile.lower.tpu import AXIS, slice_mesh
from twinstep.worker.ops.hstu_attention import AttentionRule

for topology, B, S, H, A, V, dtype, rule in {cases}:
    mesh = slice_mesh(parse_slice(topology))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((AXIS,), ()))
    def array(*shape, dtype=jnp.int32, sharding=rows):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    def both(grad, *rest):
        with kernels.over(mesh, rows=AXIS):
            options = (AttentionRule(*rule), 0.1)
            return kernels.spread_forward(*rest, *options), kernels.spread_backward(grad, *rest, *options)
    B = B * len(mesh.devices)
    q, v = array(B, S, H, A, dtype=dtype), array(B, S, H, V, dtype=dtype)
    lengths = array(B), array(B), array(dtype=jnp.float32, sharding=whole)
    text = jax.jit(both).lower(v, q, q, v, *lengths).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2, topology
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text, (topology, collective)
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_takes_both_kernels_for_each_generation_and_moves_nothing_between_devices() -> None:
    plain, windowed = (8,), (8, 2, 9)  # the fields of an AttentionRule: targets, contextual, window, …
    open_end, in_order = (8, 0, 9, True, 4), (8, 2, 9, False, 4)
    cases = [
        ("v5p:2x2x1", 2, 42, 2, 32, 32, "float32", windowed),
        ("v5p:2x2x1", 1, 1034, 1, 128, 128, "float32", open_end),
        ("v5p:2x2x1", 1, 520, 4, 128, 128, "bfloat16", plain),
        ("v6e:2x2", 2, 300, 2, 128, 128, "bfloat16", windowed),
        ("v6e:2x2", 1, 8202, 1, 128, 128, "float32", plain),
        ("v7x:2x2x1", 2, 300, 2, 64, 32, "float32", in_order),
        ("v7x:2x2x1", 1, 1034, 2, 128, 128, "bfloat16", open_end),
    ]
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE.replace("{cases}", repr(cases))],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert done.stdout.strip().endswith("compiled"), done.stderr[-2000:]
