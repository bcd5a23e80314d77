"""Which tensors of a table's rows may be held with more rows than they have: so that a mesh's devices divide them.

Rows are added at the end, zeros, and nothing may see them: a step may read rows by an embedding's ids, which name rows
of the table or are refused, and read and write those that the row update names. A step that reads the whole of a table
(a product with all rows, a dense update) is not such a step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from twinstep.worker.ops.rows import UNIQUE_ROWS, WRITE_ROWS

aten = torch.ops.aten


def by_rows(graph: fx.GraphModule, num_state: int) -> tuple[bool, ...]:
    """Say for each slot of the state whether the step touches it row by row only, by ids that count from 0."""
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"][:num_state]
    output = nodes[-1]
    results: Any = output.args[0]
    return tuple(_by_rows(slot, placeholder, output, results) for slot, placeholder in enumerate(placeholders))


def _by_rows(slot: int, placeholder: fx.Node, output: fx.Node, results: Any) -> bool:
    new = results[slot]
    written = new is not placeholder
    if written and not (
        new.target is WRITE_ROWS and new.args[0] is placeholder and _once(new, output, results) and len(new.users) == 1
    ):
        return False
    if not written and not _once(placeholder, output, results):
        return False
    return all(
        user is new or (user is output and not written) or _reads_rows(user, placeholder) for user in placeholder.users
    )


def _once(node: fx.Node, output: fx.Node, results: Any) -> bool:
    return output in node.users and sum(each is node for each in results) == 1


def _reads_rows(user: fx.Node, table: fx.Node) -> bool:
    if user.args[0] is not table or any(each is table for each in user.args[1:]):
        return False
    if user.target is aten.embedding.default:
        return True
    if user.target is not aten.index.Tensor:
        return False
    indices: Any = user.args[1]
    # Ids of the user's own may be negative, and count from the end; those that the row update makes are not.
    return len(indices) == 1 and _from_update(indices[0])


def _from_update(ids: Any) -> bool:
    if not isinstance(ids, fx.Node) or ids.target is not aten.where.self:
        return False
    rows: Any = ids.args[1]
    made = isinstance(rows, fx.Node) and rows.target is operator.getitem
    return made and rows.args[0].target is UNIQUE_ROWS
