"""What the TPU compiler says when it refuses a program, in plain words, with what to change. A table, no JAX.

Its messages are libtpu 0.0.42.1's, and those of Google's guide to SparseCores ("SparseCore deep dive for large
embedding models"); each is a row. Whatever no row knows is passed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LIMITS = "embedding.limits (max_ids, max_unique)"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of refusal."""

    pattern: str
    """A regular expression; its groups fill the problem's {0}, {1}."""
    problem: str
    """`{where}` is the slice."""
    remedy: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        r"Used ([\d.]+\w) of ([\d.]+\w) hbm",
        "the step needs {0} of HBM on each device of {where}, which has {1}",
        "take more chips, a smaller batch or smaller tables, or ask for the strategy rematerialise; "
        "`twinstep preflight SPEC` tries changes",
    ),
    Refusal(
        r"Gather operand too large",
        "a SparseCore's tile does not hold the activations of its samples (a lookup's gather operand) on {where}",
        "fewer samples a SparseCore: a smaller data.batch_size or more chips; or narrower rows (model.embedding_dim)",
    ),
    Refusal(
        r"Fixed size allocations .*do not fit in (?:Tile)?S[pP][mM][eE][mM]",
        "the buffers of the tables' limits do not fit into a SparseCore's tile memory (TileSpmem) on {where}",
        f"lower {LIMITS}: max_unique first, whose rows a tile holds; or put fewer tables into a stack",
    ),
    Refusal(
        r"No viable logical replica count",
        "no split of a SparseCore's memory holds a stack at its limits on {where}",
        f"lower {LIMITS}; or put fewer tables into a stack (embedding.disable_table_stacking)",
    ),
    Refusal(
        r"[Rr]an out of memory in memory space (?:spmem|sparse ?core|smem of sparse ?core)",
        "a SparseCore's shared memory (SPMEM) does not hold a lookup at its limits on {where}",
        f"lower {LIMITS}, or put fewer tables into a stack",
    ),
    Refusal(
        r"(?:hbm stack|HBM stack).*(?:exceed|too large|out of memory)",
        "the HBM stack of the SparseCores does not fit beside the rest on {where}",
        f"set embedding.sparsecore.serialized_tables, so that tables share it; or lower {LIMITS}",
    ),
    Refusal(
        r"[Rr]an out of memory in memory space vmem",
        "a kernel needs more fast memory (VMEM) than a core of {where} has",
        "a smaller model.transducer_dim or data.uih_len, or compile.strategies without fused_attention",
    ),
)
"""The most telling first."""


def in_plain_words(message: str, where: str) -> tuple[str, str] | None:
    """Return problem and remedy of a compiler's message; None where no row knows it."""
    for each in REFUSALS:
        if found := re.search(each.pattern, message, re.IGNORECASE | re.DOTALL):
            return each.problem.format(*found.groups(), where=where), each.remedy
    return None
