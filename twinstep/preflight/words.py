"""What preflight says, as people read it: amounts, and the whole answer as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from twinstep.preflight.report import Preflight, StepTime

_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def gib(count: float) -> str:
    """Return bytes as `1.5 GiB`, in the largest unit of which there is at least one."""
    for name, power in _UNITS:
        if count >= 1 << power:
            return f"{count / (1 << power):,.1f} {name}"
    return f"{count:,.0f} bytes"


def seconds(value: float) -> str:
    """Return seconds as `1.23 s`, `4.56 ms` or `7.89 µs`."""
    for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:,.2f} {name}"
    return f"{value * 1e9:,.0f} ns"


def as_text(found: Preflight) -> str:
    """Return all that preflight says, as a page of plain text."""
    devices = f"{found.devices:,} device{'' if found.devices == 1 else 's'}"
    lines = [f"{found.accelerator}: {devices}, {found.parameters:,} parameters", ""]
    rows = [(part.name, gib(part.bytes), part.what) for part in found.parts if part.bytes]
    rows.append(("in all", gib(found.hbm), "" if found.limit is None else f"of {gib(found.limit)}"))
    lines += _columns([("memory of a device", "bytes", "what"), *rows])
    if found.step is not None:
        lines += ["", *_columns([("a step, at the least", "of a device", "time"), *_roofs(found.step)])]
    lines += ["", *(f"note: {note}" for note in found.notes)]
    lines += [f"does not fit: {problem.problem}" for problem in found.problems]
    lines += [f"may not fit: {warning.problem}" for warning in found.warnings]
    lines += [f"  fits with {change.text}: {gib(change.bytes)} a device" for change in found.changes]
    if found.problems and not found.changes:
        lines.append("  no single change makes it fit")
    if not found.problems:
        lines.append(_verdict(found))
    return "\n".join(lines)


def _verdict(found: Preflight) -> str:
    if found.limit is None:
        return "not held against a limit: a job on processors has its host's memory"
    return "not refused: this memory was held to few measurements or none" if found.warnings else "fits"


def _roofs(step: StepTime) -> list[tuple[str, str, str]]:
    rows = [
        ("compute", f"{step.flops / 1e9:,.1f} GFLOP", seconds(step.compute_s)),
        ("memory", f"{step.hbm_bytes / 1e9:,.2f} GB", seconds(step.memory_s)),
        ("interconnect", f"{step.ici_bytes / 1e9:,.3f} GB", seconds(step.interconnect_s)),
        ("network", f"{step.dcn_bytes / 1e9:,.3f} GB", seconds(step.network_s)),
    ]
    return [*(row for row in rows if not row[1].startswith("0.000")), ("bound by", step.bound, seconds(step.seconds))]


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return rows as lines, the second column flush right."""
    first, second = (max(len(row[at]) for row in rows) for at in (0, 1))
    return [f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows]
