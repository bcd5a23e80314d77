"""Compile the CUDA kernels of HSTU attention for sm_90, without a GPU; print shared memory and size of each as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinstep.worker.ops import hstu_triton

TENSORS = {
    hstu_triton._forward: ("q", "k", "v", "out"),
    hstu_triton._backward_queries: ("q", "k", "v", "grad", "dq"),
    hstu_triton._backward_keys: ("q", "k", "v", "grad", "dk", "dv"),
}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
WIDTH = 128


def constants(blocks: hstu_triton.Blocks) -> dict[str, Any]:
    """Every branch of a rule is compiled: contextual columns, a window, and tokens that see beyond it."""
    sizes = {"A": WIDTH, "V": WIDTH, "BLOCK_A": WIDTH, "BLOCK_V": WIDTH, "QUERIES": blocks.queries, "KEYS": blocks.keys}
    return {**sizes, "CONTEXTUAL": 2, "WINDOW": 64, "TARGET_AWARE": True, "FULL": 16, "PRECISION": "ieee"}


def compiled(kernel: Any, dtype: torch.dtype) -> dict[str, int]:
    blocks = hstu_triton.blocks_for(WIDTH, dtype)
    if kernel is not hstu_triton._forward:
        blocks = dataclasses.replace(blocks, stages=1)
    fixed = constants(blocks)
    kinds = dict.fromkeys(TENSORS[kernel], "*" + NAMES[dtype])
    kinds |= {"prefix_lengths": "*i32", "target_lengths": "*i32", "n_place": "*fp32", "alpha": "fp32"}
    names = [each.name for each in kernel.params]
    fixed |= {name: 1 for name in names if name.endswith("_width")}  # rows of numbers lie together
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in fixed.items()}
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared_bytes": made.metadata.shared, "cubin_bytes": len(made.asm["cubin"])}


if __name__ == "__main__":
    print(json.dumps({f"{kernel.__name__}, {dtype}": compiled(kernel, dtype) for kernel in TENSORS for dtype in NAMES}))
