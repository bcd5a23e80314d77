"""The TPU kernels of HSTU attention over packed tokens: interpreted against plain PyTorch on rows, and compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from twinstep.worker.compile.lower import pallas_attention, pallas_jagged
from twinstep.worker.compile.lower.pallas_jagged import Walk, backward, facts_of, forward, sees
from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward, slot_valid

ALPHA, SLOTS, TARGETS = 0.3, 24, 4
RULES = [
    AttentionRule(TARGETS),
    AttentionRule(TARGETS, contextual_len=3, window=2, full_len=4),
    AttentionRule(TARGETS, window=2, target_aware=False, full_len=3),
]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of 8 tokens or 16, so that rows cross them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_attention, "LANES", 8)
        patch.setattr(pallas_attention, "LARGEST_BLOCK", 16)
        yield


class Packed:
    """Rows of drawn lengths, their tokens end to end with empty ones between and after."""

    def __init__(self, prefix: list[int], targets: list[int], gaps: list[int], heads: int, A: int, V: int) -> None:
        generator = torch.Generator().manual_seed(len(prefix))
        self.prefix, self.targets = torch.tensor(prefix), torch.tensor(targets)
        shapes = [(len(prefix), SLOTS, heads, width) for width in (V, A, A, V)]
        self.rows = [torch.randn(*shape, generator=generator) for shape in shapes]
        valid = slot_valid(self.prefix, self.targets, SLOTS, TARGETS)
        for each in self.rows:
            each[~valid] = float("nan")
        self.segments, self.places = [], []
        for row, gap in enumerate(gaps):
            slots = valid[row].nonzero()[:, 0].tolist()
            self.segments += [row] * len(slots) + [-1] * gap
            self.places += [(row, slot) for slot in slots] + [None] * gap
        self.n = torch.tensor(float(SLOTS - 2))

    def pack(self, rows: Tensor, empty: float) -> Tensor:
        out = torch.full((len(self.places), *rows.shape[2:]), empty)
        for token, place in enumerate(self.places):
            if place is not None:
                out[token] = rows[place]
        return out

    def ours(self, rule: AttentionRule, dtype: Any = jnp.float32) -> list[Any]:
        wide = [jnp.asarray(self.pack(each, float("nan")).numpy()).astype(dtype) for each in self.rows]
        lengths = [jnp.asarray(each, jnp.int32) for each in (self.segments, self.prefix.numpy(), self.targets.numpy())]
        rest = (*lengths, jnp.asarray(self.n.numpy()), rule, ALPHA)
        options: dict[str, Any] = {"longest": SLOTS, "interpret": True}
        return [forward(*wide[1:], *rest, **options), *backward(*wide, *rest, **options)]

    def theirs(self, rule: AttentionRule) -> list[Tensor]:
        grad, *rest = (*self.rows, self.prefix, self.targets, self.n)
        found = (reference(*rest, rule, ALPHA), *reference_backward(grad, *rest, rule, ALPHA))
        return [self.pack(each, 0.0) for each in found]

    def check(self, rule: AttentionRule, dtype: Any = jnp.float32, tolerance: float = 3e-6) -> None:
        names = ("out", "dq", "dk", "dv")
        for name, ours, theirs in zip(names, self.ours(rule, dtype), self.theirs(rule), strict=True):
            gap = np.abs(np.asarray(ours, np.float32) - theirs.numpy()).max(initial=0)
            assert gap <= tolerance * max(float(theirs.abs().max()), 1e-3), (name, gap)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed_rows_equal_plain_pytorch_on_rows_of_slots(rule: AttentionRule) -> None:
    Packed([20, 9, 3, 16], [4, 2, 0, 4], [1, 0, 2, 5], heads=2, A=8, V=4).check(rule)


def test_bfloat16_sums_in_float32() -> None:
    Packed([20, 9, 5], [4, 2, 1], [0, 1, 3], heads=1, A=8, V=8).check(RULES[0], jnp.bfloat16, tolerance=3e-2)


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_no_pair_of_blocks_is_left_out_in_which_somebody_sees_somebody(rule: AttentionRule) -> None:
    prefix, targets, gaps = [20, 3, 9, 17], [4, 0, 1, 3], [0, 7, 1, 12]
    packed = Packed(prefix, targets, gaps, heads=1, A=1, V=1)
    walk = Walk(len(packed.segments), SLOTS, 8, rule, ALPHA)
    facts, low, high = facts_of(jnp.asarray(packed.segments), jnp.asarray(prefix), jnp.asarray(targets), walk)
    mask = np.asarray(sees([each[:, None] for each in facts], [each[None] for each in facts], rule))
    needed = mask.reshape(walk.num_blocks, 8, walk.num_blocks, 8).any(axis=(1, 3))
    low, high = np.asarray(low), np.asarray(high)
    blocks, steps = range(walk.num_blocks), range(walk.span)

    def met(i: int, j: int) -> bool:
        return 0 <= i < walk.num_blocks and 0 <= j < walk.num_blocks and bool(walk.meets(i, j, low, high))

    by_query = {(i, walk.keys_of(i, s)) for i in blocks for s in steps if met(i, walk.keys_of(i, s))}
    by_key = {(walk.queries_of(j, s), j) for j in blocks for s in steps if met(walk.queries_of(j, s), j)}
    assert {(int(i), int(j)) for i, j in zip(*needed.nonzero(), strict=True)} <= by_query & by_key


_COMPILE = """
import json, os
from twinstep.worker.compile.aot import ENVIRONMENT
os.environ.update(ENVIRONMENT)
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.lower import pallas_jagged
from twinstep.worker.compile.lower.tpu import slice_mesh
from twinstep.worker.ops.hstu_attention import AttentionRule

M, B, H = 4096, 16, 4
for topology in ("v5p:2x2x1", "v6e:2x2"):
    mesh = slice_mesh(parse_slice(topology))
    whole = NamedSharding(mesh, PartitionSpec())
    cases = (128, "float32", (6,)), (128, "bfloat16", (6, 3, 64)), (32, "float32", (6, 0, 16, False))
    for width, dtype, rule in cases:
        def array(*shape, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        def both(grad, *rest):
            options = {"rule": AttentionRule(*rule), "alpha": 0.1, "longest": 1040}
            return pallas_jagged.forward(*rest, **options), pallas_jagged.backward(grad, *rest, **options)
        wide = [array(M, H, width, dtype=dtype)] * 4
        given = (*wide, array(M), array(B), array(B), array(dtype=jnp.float32))
        traced = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
                                       check_vma=False)).trace(*given)
        done = traced.lower(lowering_platforms=("tpu",)).compile()
        text = done.as_text()
        print(json.dumps([topology, text.count('custom_call_target="tpu_custom_call"'),
                          done.memory_analysis().temp_size_in_bytes, M * H * 128 * (2 if dtype == "bfloat16" else 4)]))
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_the_tpu_compiler_takes_them_and_no_scores_are_in_hbm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {each[0] for each in lines} == {"v5p:2x2x1", "v6e:2x2"}
    for _, kernels, temp, of_one in lines:
        assert kernels == 3
        assert temp < 12 * of_one + (1 << 20), "a few copies of the operands, where scores would be M × M"


def test_the_kernels_skip_what_no_row_joins() -> None:
    """Of 4 rows in 8 blocks, a block meets those of its own row: not all."""
    walk = Walk(64, 16, 8, RULES[0], ALPHA)
    segments = jnp.repeat(jnp.arange(4), 16)
    _, low, high = facts_of(segments, jnp.full(4, 16), jnp.zeros(4, jnp.int32), walk)
    met = sum(bool(walk.meets(i, walk.keys_of(i, s), low, high)) for i in range(8) for s in range(walk.span))
    assert met == 8 + 4
    assert pallas_jagged.NOBODY < 0
