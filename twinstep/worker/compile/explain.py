"""What the compiler did with a step, as tables: `print(runner.explain())`.

A table is made of plain strings, so that it can be printed, drawn by rich, or written as JSON.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinstep.spec.placement import Spec
from twinstep.worker.compile.annotate import ROLES, Annotations, Value
from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.passes.table import FIRST_TRACE_PASSES, PASSES

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MOST_ROWS = 24  # of a section that would grow with the model; the rest is counted


@dataclass(frozen=True, slots=True)
class Section:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    """Columns of numbers."""

    def text(self) -> str:
        """Return it with aligned columns."""
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [self.title]
        for row in (self.columns, *self.rows):
            cells = [
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for name, cell, width in zip(self.columns, row, widths, strict=True)
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)

    def as_rows(self) -> list[dict[str, str]]:
        """Return the rows by column, for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Runner.explain` returns: text by `str()`, tables by `rich.print`, JSON by `as_dict()`."""

    sections: tuple[Section, ...]
    annotations: Annotations

    def __str__(self) -> str:
        return "\n\n".join(section.text() for section in self.sections)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        for section in self.sections:
            table = Table(title=Text(section.title), title_justify="left", box=None, pad_edge=False)
            for name in section.columns:
                table.add_column(Text(name), justify="right" if name in section.right else "left", overflow="fold")
            for row in section.rows:
                table.add_row(*map(Text, row))
            yield table
            yield Text("")

    def values(self, role: str | None = None) -> Section:
        """Return every value as one table, or those of one role."""
        chosen = [value for value in self.annotations.values if role in (None, value.role)]
        columns = ("value", "role", "stage", "region", "shape", "dtype", "bytes", "placement", "of", "op")
        rows = tuple(_value_row(value) for value in chosen)
        return Section(f"{len(rows)} values", columns, rows, frozenset({"bytes"}))

    def as_dict(self) -> dict[str, Any]:
        """Return the sections as lists of rows by column, for JSON."""
        return {section.title: section.as_rows() for section in self.sections}


def explain(captured: Captured, annotations: Annotations, facts: Mapping[str, str]) -> Explanation:
    """Return the explanation of a captured step.

    Args:
        facts: what the caller knows of the program (key, backend, seconds), for the first section.
    """
    sections = [
        Section("step", ("what", "value"), tuple(facts.items())),
        _stages(captured, annotations),
        _passes(captured),
        _partition(captured),
        _roles(annotations),
        _regions(annotations),
        _collectives(annotations),
        _placement(annotations),
    ]
    return Explanation(tuple(section for section in sections if section.rows), annotations)


def _stages(captured: Captured, annotations: Annotations) -> Section:
    state = annotations.values[: captured.num_state]
    known = sum(any(value.dims) for value in annotations.values)
    batch = "unknown" if annotations.batch_size is None else str(annotations.batch_size)
    changed = sum(captured.changed.values())
    rows = (
        ("prepare", f"{captured.num_state} tensors of state, {size(sum(value.bytes for value in state))}"),
        ("capture", f"{len(annotations.values)} values in one graph, {captured.num_batch} batch leaves"),
        ("annotate", f"batch size {batch}; {known} values have a batch dimension"),
        ("transform", f"{len(captured.changed)} passes ran, {changed} nodes changed"),
        ("lower", captured.context.backend),
    )
    return Section("stages", ("stage", "result"), rows)


def _passes(captured: Captured) -> Section:
    rows = []
    for each in (*FIRST_TRACE_PASSES, *PASSES):
        count = captured.changed.get(each.name)
        note = _note(captured.context.notes.get(each.name))
        if count is not None or note:
            rows.append((each.name, "" if count is None else str(count), "yes" if each.keeps_bits else "no", note))
    return Section("passes", ("pass", "nodes", "keeps bits", "note"), tuple(rows), frozenset({"nodes"}))


def _partition(captured: Captured) -> Section:
    """What went to which compiled piece, as the stages after the passes noted it; empty before the step is lowered."""
    of_passes = {each.name for each in (*FIRST_TRACE_PASSES, *PASSES)}
    rows = []
    for name, found in captured.context.notes.items():
        if name not in of_passes:
            parts = found if isinstance(found, Mapping) else {"": found}
            rows += [(name, part, _note(value) or "none") for part, value in parts.items()]
    return Section("partition", ("stage", "what", "note"), tuple(rows))


def _note(found: Any) -> str:
    if found is None:
        return ""
    if isinstance(found, Mapping):
        return "; ".join(f"{name}: {_note(value)}" for name, value in found.items())
    if isinstance(found, Sequence) and not isinstance(found, str):
        flat = all(isinstance(each, str | int | float) for each in found)
        return (" " if flat and len(found) == 2 else ", " if flat else "; ").join(_note(each) for each in found)
    return str(found)


def _roles(annotations: Annotations) -> Section:
    rows = []
    for role in ROLES:
        values = annotations.of_role(role)
        if values:
            grows = sum(any(value.dims) for value in values)
            rows.append((role, str(len(values)), size(sum(value.bytes for value in values)), str(grows)))
    columns = ("role", "values", "bytes", "grow with batch")
    return Section("roles", columns, tuple(rows), frozenset(columns[1:]))


def _regions(annotations: Annotations) -> Section:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for value in annotations.values:
        if value.stage != "input":
            counts[value.region or "(step)"][value.stage] += 1
    ranked = sorted(counts.items(), key=lambda item: -item[1].total())
    stages = ("forward", "backward", "update")
    rows = [(name, *(str(found[stage]) for stage in stages)) for name, found in ranked[:MOST_ROWS]]
    if rest := ranked[MOST_ROWS:]:
        totals = [str(sum(found[stage] for _, found in rest)) for stage in stages]
        rows.append((f"{len(rest)} more", *totals))
    return Section("regions", ("region", *stages), tuple(rows), frozenset(stages))


def _collectives(annotations: Annotations) -> Section:
    """Where a batch that is split over devices must be joined; what XLA makes of it is in `graph("lowered")`."""
    if annotations.mesh is None or annotations.mesh.size == 1:
        return Section("collectives", (), ())
    found: dict[tuple[str, str], list[Value]] = defaultdict(list)
    for value in annotations.values:
        if value.reduce:
            found[f"all-reduce ({value.reduce})", value.stage].append(value)
    rows = [
        (kind, stage, str(len(values)), size(sum(value.bytes for value in values)))
        for (kind, stage), values in found.items()
    ]
    columns = ("collective", "stage", "values", "bytes")
    return Section("collectives", columns, tuple(rows), frozenset({"values", "bytes"}))


def _placement(annotations: Annotations) -> Section:
    if annotations.mesh is None or annotations.placement is None:
        return Section("placement", (), ())
    inputs = [value for value in annotations.values if value.stage == "input" and value.label]
    split = [value for value in inputs if any(value.spec)]
    whole = [value for value in inputs if not any(value.spec)]
    rows = [(value.label, value.shown_shape, shown_spec(value.spec)) for value in split[:MOST_ROWS]]
    if len(split) > MOST_ROWS:
        rows.append((f"{len(split) - MOST_ROWS} more", "", "split"))
    rows.append((f"{len(whole)} others", size(sum(value.bytes for value in whole)), "on every device"))
    rows += [(note, "", "") for note in annotations.placement.notes]
    return Section(f"placement on {annotations.mesh}", ("input", "shape", "split over"), tuple(rows))


def _value_row(value: Value) -> tuple[str, ...]:
    reduce = f" {value.reduce} over the batch" if value.reduce else ""
    placed = (shown_spec(value.spec) if any(value.spec) else "") + reduce
    return (
        value.name,
        value.role,
        value.stage,
        value.region,
        value.shown_shape,
        value.dtype,
        str(value.bytes),
        placed.strip(),
        value.label,
        value.op,
    )


def shown_spec(spec: Spec) -> str:
    """Return a Spec as JAX writes it: `(data, -)`."""
    return f"({', '.join('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in spec)})"


def size(count: int) -> str:
    """Return bytes in binary units, three digits."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
