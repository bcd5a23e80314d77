"""Whether tables fit into this machine's memory, asked before they are made: else the system kills the process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from twinstep.spec.errors import TrainError
from twinstep.worker.models.config import TableConfig

GIB = 2**30
COPIES = 2  # of a table, at the least: the weights and their dense gradient


def check_memory(tables: Sequence[TableConfig], processes: int = 1) -> None:
    """Refuse tables larger than memory; each of `processes` has its own part.

    Raises:
        TrainError: they are.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = COPIES * sum(table.rows * table.dim * 4 for table in tables) / processes
    if needed > memory:
        largest = max(tables, key=lambda table: table.rows)
        raise TrainError(
            f"the tables and their gradients take {needed / GIB:.1f} GiB, this machine has {memory / GIB:.1f} GiB",
            remedy=f"lower data.rows.{largest.name} ({largest.rows:,} rows) or model.embedding_dim ({largest.dim})",
        )
