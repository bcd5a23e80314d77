"""What a compiled TPU program reads and writes, by the kind of work: where the bytes of an AotReport come from.

`tpu.py` asks. Each instruction is made a program of its own, and XLA's cost analysis counts its operands and results
one by one; a kernel of ours (a custom call) has the estimate it was given. Two numbers are kept. `bytes` is the
compiler's way to count: every operand and result, wherever it lives; a copy between memory and the chip's fast memory
(VMEM) comes to four times its size there (operand, both results of its start, result of its end). `hbm_bytes` is what
crosses HBM: operands and results in VMEM, which the text marks `S(1)`, are left out, and such a copy counts once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]

from twinstep.worker.compile.aot_report import Traffic
from twinstep.worker.compile.hlo import COLLECTIVES, HloText, array_bytes, parse_hlo

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_ATTRIBUTES = re.compile(r", (?:metadata|backend_config|sharding|frontend_attributes)=\{.*$")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations=\{)=?(%[\w.\-]+)")
_COST = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')
_KERNEL = re.compile(r'op_name="[^"]*?([\w.\-]+)/pallas_call"')
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([0-9,]*)\](\{[^}]*\})?")
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all")
_FAST = "S(1)"

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gathers and scatters", ("gather", "scatter")),
    ("products", ("convolution", "dot")),
    ("sums", ("reduce", "reduce-window")),
    ("layout copies", ("copy", "transpose", "reshape", "pad", "slice", "concatenate", "dynamic-update-slice")),
)
"""Kinds of work, and the operations that make an instruction one; the first row that fits."""
PREFETCH, COLLECTIVE, OTHER = "moves to and from VMEM", "collectives", "elementwise"


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    op: str
    line: str
    operands: tuple[str, ...]


def traffic(text: str) -> tuple[Traffic, ...]:
    """Return the bytes of one step by kind of work, most first; a loop's body counts as often as it turns."""
    hlo = parse_hlo(text)
    bodies = {loop.body for loop in hlo.loops()}
    counted: Counter[str] = Counter()
    crossed: Counter[str] = Counter()
    for name, times in hlo.runs().items():
        if name == hlo.entry or name in bodies:
            instructions = list(_instructions(hlo.computations[name].lines))
            shapes = {each.name: each.shape for each in instructions}
            for each in instructions:
                if each.op not in _FREE:
                    kind, moved, hbm = _moved(each, shapes, hlo)
                    counted[kind] += times * moved
                    crossed[kind] += times * hbm
    return tuple(
        Traffic(kind=kind, bytes=size, hbm_bytes=crossed[kind]) for kind, size in counted.most_common() if size
    )


def _instructions(lines: Iterable[str]) -> Iterable[_Instruction]:
    for line in lines:
        if found := _INSTRUCTION.match(line):
            yield _Instruction(found[1], found[2], found[3], line, tuple(_operands(line[found.end() :])))


def _operands(rest: str) -> list[str]:
    depth = 1
    for end, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return re.findall(r"%[\w.\-]+", rest[:end])
    return []


def _moved(each: _Instruction, shapes: dict[str, str], hlo: HloText) -> tuple[str, int, int]:
    """Return an instruction's kind, its bytes, and those of them in HBM."""
    base = each.op.removesuffix("-start").removesuffix("-done")
    if estimate := _COST.search(each.line):
        kernel = _KERNEL.search(each.line)
        return f"kernel {kernel[1]}" if kernel else "kernels", int(estimate[1]), int(estimate[1])
    if base == "copy" and base != each.op:
        size = _bytes(_ARRAY.search(each.shape))
        return PREFETCH, size * (1 if each.op.endswith("-done") else 3), 0 if each.op.endswith("-done") else size
    if each.op.endswith(("-start", "-done")) and base not in COLLECTIVES:
        size = sum(map(_bytes, _ARRAY.finditer(each.shape)))
        return PREFETCH, size, 0 if each.op.endswith("-done") else size
    kind = COLLECTIVE if base in COLLECTIVES else _kind(each, hlo)
    costs = _costs(each, shapes, hlo)
    moved = int(costs.get("bytes accessed", 0))
    inputs = [at for at, name in enumerate(each.operands) if _FAST in shapes.get(name, "")]
    fast = sum(int(costs.get(f"bytes accessed{at}{{}}", 0)) for at in inputs)
    results = [found[0] for found in _ARRAY.finditer(each.shape)]
    if len(results) == 1:
        fast += int(costs.get("bytes accessedout{}", 0)) if _FAST in results[0] else 0
    else:
        fast += sum(
            int(costs.get(f"bytes accessedout{{{at}}}", 0)) for at, result in enumerate(results) if _FAST in result
        )
    return kind, moved, max(moved - fast, 0)


def _kind(each: _Instruction, hlo: HloText) -> str:
    ops = {each.op}
    for name in _needed(each.line, hlo):
        ops |= {found[3] for line in hlo.computations[name].lines if (found := _INSTRUCTION.match(line))}
    inner = ops if each.op == "fusion" else {each.op}
    for kind, names in KINDS[:3]:
        if inner.intersection(names):
            return kind
    return KINDS[3][0] if inner <= {*KINDS[3][1], *_FREE, "fusion", "broadcast"} else OTHER


def _needed(line: str, hlo: HloText) -> list[str]:
    """Return the computations that an instruction calls, those they call before them."""
    found: dict[str, None] = {}

    def visit(text: str) -> None:
        for name in _CALLED.findall(_without_metadata(text)):
            if name in hlo.computations and name not in found:
                for each in hlo.computations[name].lines:
                    visit(each)
                found[name] = None

    visit(line)
    return list(found)


def _without_metadata(line: str) -> str:
    return _ATTRIBUTES.sub("", line)


def _costs(each: _Instruction, shapes: dict[str, str], hlo: HloText) -> dict[str, float]:
    """Return XLA's cost analysis of one instruction: `bytes accessed`, and that of each operand and result."""
    parts = [
        f"{name} {{\n" + "\n".join(map(_without_metadata, hlo.computations[name].lines)) + "\n}\n"
        for name in _needed(each.line, hlo)
    ]
    operands = dict.fromkeys(each.operands)
    inputs = [f"  {name} = {shapes[name]} parameter({at})" for at, name in enumerate(operands) if name in shapes]
    root = "  ROOT " + _without_metadata(each.line).strip().removeprefix("ROOT ")
    program = "HloModule part, is_scheduled=true\n\n" + "\n".join(parts)
    program += "\nENTRY %part {\n" + "\n".join(inputs) + f"\n{root}\n}}\n"
    try:
        found: Any = _jax.hlo_module_cost_analysis(_client(), _hlo.hlo_module_from_text(program))
    except Exception:  # XLA's own errors, of instructions that only the TPU's own analysis knows
        arrays = [
            *_ARRAY.finditer(each.shape),
            *(a for name in operands for a in _ARRAY.finditer(shapes.get(name, ""))),
        ]
        return {"bytes accessed": float(sum(map(_bytes, arrays)))}
    return dict(found)


def _client() -> Any:
    return jax.devices("cpu")[0].client


def _bytes(array: re.Match[str] | None) -> int:
    try:
        return array_bytes(array[1], array[2]) if array else 0
    except KeyError:  # a dtype that moves no bytes worth counting
        return 0
