"""The parts of `gpu.sh`, each a process: `python -m bench.gpu PART --device cuda --size full --out FILE`.

They run on a CPU as well, at a tiny size, which is how they are tested; no number of a CPU is of any use. A part needs
what it measures and no more: `attention` runs with torch and Triton alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTS = ("facts", "attention", "parity", "step")
SIZES = ("full", "tiny")


def synchronize(device: str) -> None:
    """Wait for all that was given to a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, *, runs: int, warmup: int = 3) -> dict[str, float]:
    """Return median and least seconds of `work`, each run timed by itself: by events on a GPU, else by the clock."""
    for _ in range(warmup):
        work()
    synchronize(device)
    found = []
    for _ in range(runs):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return {"median": statistics.median(found), "min": min(found)}


# What the machine can do: the ceilings that a kernel is held against.


def ceilings(device: str, dtype: torch.dtype, size: str) -> dict[str, float]:
    """Return the FLOP/s of a large matrix product and the bytes/s of a copy, read and written, as measured now."""
    side, count = (8192, 1 << 30) if size == "full" else (256, 1 << 18)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds_of(lambda: left @ right, device, runs=10)
    source = torch.empty(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, runs=10)
    return {"flops_per_s": 2 * side**3 / product["min"], "bytes_per_s": 2 * count / copy["min"]}


def facts(device: str, size: str) -> dict[str, Any]:
    """Return what is installed and what the device says of itself."""
    import importlib.metadata as metadata

    names = ("torch", "triton", "jax", "pydantic", "networkx", "rich", "fbgemm-gpu", "torchrec")
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    found: dict[str, Any] = {"versions": versions, "python": sys.version.split()[0]}
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found["device"] = {
            "name": about.name,
            "memory_bytes": about.total_memory,
            "multiprocessors": about.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    found["ceilings"] = {str(kind): ceilings(device, kind, size) for kind in (torch.bfloat16, torch.float32)}
    return found


# Attention.


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One batch of attention. DLRMv3's at full size: histories of 512 events and 8 candidates, 4 heads of 128."""

    batch: int = 256
    prefix: int = 512
    num_targets: int = 8
    heads: int = 4
    width: int = 128
    contextual_len: int = 0
    window: int = 0
    full_len: int = 0


ATTENTION = {
    "full": (Rows(), Rows(contextual_len=2, window=128, full_len=32), Rows(batch=16, prefix=4096)),
    "tiny": (Rows(batch=2, prefix=40, num_targets=4, heads=2, width=16, contextual_len=2, window=16),),
}
CHECKED_ROWS = 2  # of a batch, against the reference in float64, which writes all scores
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def attention(device: str, size: str) -> dict[str, Any]:
    """Return, by batch and dtype, the kernel's gap to the reference, its times, and shares of the roofline."""
    found = []
    for rows in ATTENTION[size]:
        for dtype in (torch.bfloat16, torch.float32):
            found.append(_attention(rows, device, dtype, size))
            print(json.dumps(found[-1]), flush=True)
    return {"batches": found, "equal": all(each["equal"] for each in found)}


def _attention(rows: Rows, device: str, dtype: torch.dtype, size: str) -> dict[str, Any]:
    grad, q, k, v, rest = _numbers(rows, device, dtype)
    options = (rows.num_targets, rows.contextual_len, rows.window, True, rows.full_len, rows.width**-0.5)
    operator, backward = torch.ops.twinstep.hstu_attention, torch.ops.twinstep.hstu_attention_backward
    got = (operator(q, k, v, *rest, *options), *backward(grad, q, k, v, *rest, *options))
    gaps = _gaps(rows, (grad, q, k, v), rest, options, got)
    runs = 20 if size == "full" else 2
    times = {
        "forward": seconds_of(lambda: operator(q, k, v, *rest, *options), device, runs=runs),
        "backward": seconds_of(lambda: backward(grad, q, k, v, *rest, *options), device, runs=runs),
    }
    work = _work(rows, rest, dtype)
    limits = ceilings(device, dtype, size)
    result: dict[str, Any] = {
        "rows": asdict(rows),
        "dtype": str(dtype),
        "gaps": gaps,
        "equal": max(gaps) <= TOLERANCES[dtype],
        "blocks": _tried_blocks(rows, q, k, v, grad, rest, options) if device == "cuda" and size == "full" else {},
    }
    for name, (flops, moved) in work.items():
        took = times[name]["median"]
        least = max(flops / limits["flops_per_s"], moved / limits["bytes_per_s"])
        result[name] = {
            "ms": took * 1e3,
            "flops_per_s": flops / took,
            "bytes_per_s": moved / took,
            "share_of_roofline": least / took,
        }
    return result


def _numbers(rows: Rows, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return grad, q, k, v and (prefix lengths, target lengths, n); lengths are even over 1 to the longest."""
    from twinstep.worker.ops import hstu_attention  # noqa: F401  it registers the operators

    generator = torch.Generator().manual_seed(0)
    shape = (rows.batch, rows.prefix + rows.num_targets, rows.heads, rows.width)
    grad, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    prefix = torch.linspace(1, rows.prefix, rows.batch).round().to(torch.int64).to(device)
    targets = torch.full((rows.batch,), rows.num_targets, device=device)
    return grad, q, k, v, (prefix, targets, torch.tensor(float(shape[1]), device=device))


def _gaps(
    rows: Rows,
    inputs: tuple[Tensor, ...],
    rest: tuple[Tensor, ...],
    options: tuple[Any, ...],
    got: tuple[Tensor, ...],
) -> list[float]:
    """Return the largest differences to the reference, of output, dq, dk, dv, each over its largest number."""
    from twinstep.worker.ops.hstu_attention import AttentionRule, reference, reference_backward

    rule, alpha = AttentionRule(*options[:-1]), options[-1]
    some = slice(rows.batch - CHECKED_ROWS, rows.batch)  # the longest ones
    grad, q, k, v = (each[some].double() for each in inputs)
    lengths = (rest[0][some], rest[1][some], rest[2].double())
    want = (
        reference(q, k, v, *lengths, rule, alpha),
        *reference_backward(grad, q, k, v, *lengths, rule, alpha),
    )
    return [
        float((ours[some].double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
        for ours, theirs in zip(got, want, strict=True)
    ]


def _work(rows: Rows, rest: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return (FLOP, bytes) of forward and backward that no kernel can spare: pairs that are seen, tokens once."""
    from twinstep.worker.ops.hstu_attention import AttentionRule, slot_mask

    rule = AttentionRule(rows.num_targets, rows.contextual_len, rows.window, True, rows.full_len)
    slots = rows.prefix + rows.num_targets
    pairs = sum(  # row by row: the mask of all would take gigabytes
        int(slot_mask(rest[0][each : each + 1], rest[1][each : each + 1], slots, rule).sum())
        for each in range(rows.batch)
    )
    tokens = int(rest[0].sum() + rest[1].sum())
    each = 2.0 * pairs * rows.heads * rows.width  # one product of every seen query and key, over the width
    line = tokens * rows.heads * rows.width * dtype.itemsize
    # Forward: q·k, weights·v; q, k, v, out. Backward: five products; q, k, v, grad read, three gradients written.
    return {"forward": (2 * each, 4.0 * line), "backward": (5 * each, 7.0 * line)}


def _tried_blocks(rows: Rows, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rest: Any, options: Any) -> dict[str, Any]:
    """Return milliseconds of other ways to cut and launch the kernels; what does not fit says why."""
    from twinstep.worker.ops import hstu_triton
    from twinstep.worker.ops.hstu_triton import Blocks

    found: dict[str, Any] = {}
    for blocks in (Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 3), Blocks(64, 32, 4, 3), Blocks(32, 32, 4, 2)):
        name = f"{blocks.queries}x{blocks.keys}, {blocks.warps} warps, {blocks.stages} stages"
        try:
            ahead = seconds_of(lambda b=blocks: hstu_triton.forward(q, k, v, *rest, *options, blocks=b), "cuda", runs=5)  # type: ignore[misc]
            back = seconds_of(
                lambda b=blocks: hstu_triton.backward(grad, q, k, v, *rest, *options, blocks=b),  # type: ignore[misc]
                "cuda",
                runs=5,
            )
        except Exception as error:  # too little shared memory, for one: that is the finding
            found[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[name] = {"forward_ms": ahead["median"] * 1e3, "backward_ms": back["median"] * 1e3}
    return found


# The step. Full size: the DLRMv3 of examples/clusters/gpu-*.yaml, with the batch of one GPU.

MODEL = {
    "full": {
        "embedding_dim": 128, "transducer_dim": 512, "num_layers": 5, "num_heads": 4,
        "linear_dim": 128, "attention_dim": 128, "hidden_dim": 512,
    },
    "tiny": {
        "embedding_dim": 4, "transducer_dim": 4, "num_layers": 1, "num_heads": 1,
        "linear_dim": 4, "attention_dim": 4, "hidden_dim": 4,
    },
}  # fmt: skip
DATA = {
    "full": {"synthetic_events": 1_000_000, "batch_size": 256, "uih_len": 512, "uih_budget": 384, "num_candidates": 8},
    "tiny": {"synthetic_events": 400, "batch_size": 4, "uih_len": 6, "num_candidates": 2},
}
OPTIMIZERS = {"dense": {"kind": "adam"}, "sparse": {"kind": "rowwise_adagrad"}}
VARIANTS = ("eager", "torch_compile", "inductor")


def spec_of(model: str, data: str, **changes: Any) -> dict[str, Any]:
    """Return a job spec of these sizes."""
    return {
        "name": "bench-gpu",
        "model": MODEL[model],
        "data": {"dataset": "synthetic", **DATA[data], **changes},
        "optimizers": OPTIMIZERS,
    }


def _moved(spec: dict[str, Any], device: str, batches: int) -> tuple[Any, list[Any]]:
    """Return a subject whose model, optimizers and batches are on a device."""
    import torch.utils._pytree as pytree

    from bench.subject import Subject
    from twinstep.worker.embedding.optim import build_optimizers

    subject = Subject(spec)
    subject.model.to(device)
    subject.optimizers = build_optimizers(subject.spec.optimizers, subject.model)
    drawn = [pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), each) for each in subject.batches(batches)]
    return subject, drawn


def parity(device: str, size: str) -> dict[str, Any]:
    """Return how far the whole-step program of Inductor is from eager on this device, tensor by tensor."""
    from twinstep.worker.compile.parity import parity as compare
    from twinstep.worker.train.step import make_train_step

    steps = 10 if size == "full" else 2
    spec = (
        spec_of("tiny", "tiny")
        if size == "tiny"
        else spec_of("full", "full", batch_size=32, uih_len=128, uih_budget=96)
    )
    subject, batches = _moved(spec, device, steps)
    report = compare(
        make_train_step(clip_norm=None), subject.model, subject.optimizers, batches, ("inductor",), steps, bisect=False
    )
    return {"equal": report.ok, "report": report.to_json()}


def step(device: str, size: str) -> dict[str, Any]:
    """Return milliseconds of a step by variant, peaks of device memory, and the losses, which must agree."""
    from bench.variants import torch_compile_step

    runs = 20 if size == "full" else 2
    found: dict[str, Any] = {}
    for name in VARIANTS:
        try:
            found[name] = _variant(name, device, size, runs, torch_compile_step)
        except Exception as error:  # one variant's failure is a finding, and no reason to lose the others
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(name, json.dumps(found[name]), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    losses = [each["loss"] for each in found.values() if "loss" in each]
    equal = len(losses) == len(VARIANTS) and max(losses) - min(losses) <= 1e-2 * abs(losses[0])
    return {"variants": found, "equal": equal, "spec": spec_of(size, size)}


def _variant(name: str, device: str, size: str, runs: int, compiled: Callable[[Any], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    subject, batches = _moved(spec_of(size, size), device, 4)
    go = compiled(subject) if name == "torch_compile" else subject.compiler(name, cache_dir=None)
    started = time.perf_counter()
    loss = float(go(batches[0]).loss.detach())
    first = time.perf_counter() - started
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    turn = iter(range(10**9))
    times = seconds_of(lambda: go(batches[next(turn) % len(batches)]).loss, device, runs=runs)
    loss = float(go(batches[0]).loss.detach())
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return {
        "ms": times["median"] * 1e3,
        "least_ms": times["min"] * 1e3,
        "first_s": first,
        "peak_mib": peak,
        "loss": loss,
    }


def main(argv: Sequence[str]) -> int:
    """Run one part and write its result; 1 where what was compared is not equal."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench: torch sees no CUDA device\nfix: run on a GPU, or with DEVICE=cpu SIZE=tiny", file=sys.stderr)
        return 1
    work = {"facts": facts, "attention": attention, "parity": parity, "step": step}[options.part]
    found = {"part": options.part, "device": options.device, "size": options.size, **work(options.device, options.size)}
    text = json.dumps(found, indent=2, sort_keys=True)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text if options.part == "facts" else f"{options.part}: equal: {found.get('equal')}", flush=True)
    return 0 if found.get("equal", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
