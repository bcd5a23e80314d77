"""A parity report as one HTML page that loads nothing: verdict, picture, tables. Pure; names are escaped.

The picture has a panel per kind of tensor: error over tolerance of the worst tensor of that kind, by step, one line per
backend, on a logarithmic scale with the tolerance at 1. `dark` and `light` follow the reader's setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from twinstep.worker.compile.parity.compare import KINDS, Kind
from twinstep.worker.compile.parity.result import BackendReport, ParityReport, TensorReport

WIDTH, HEIGHT = 300, 170  # of a panel, in pixels at scale 1
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 26, 24  # margins around its axes
LOWEST = -6  # exponent of ten at the bottom: what is smaller, zero with it, lies on it
WORDS: dict[Kind, str] = {
    "loss": "losses",
    "output": "outputs",
    "gradient": "gradients",
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer state",
}

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1c1f24; --dim: #5c6470; --rule: #d8dce2; --bad: #b42318;
  --good: #1a7f37; --line0: #1f5fbf; --line1: #b3540b; --line2: #6b3fa0; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --ink: #e6e9ed; --dim: #9aa4b0; --rule: #343a42;
  --bad: #ff8b7e; --good: #5fd07f; --line0: #7ab0ff; --line1: #ffac66; --line2: #c4a3f5; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
.verdict { font-weight: 600; }
.panels { display: flex; flex-wrap: wrap; gap: .6rem; }
.panels svg { flex: 0 1 300px; min-width: 240px; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } svg text.head { fill: var(--ink); font-weight: 600; }
.axis { stroke: var(--rule); fill: none; } .tolerance { stroke: var(--bad); stroke-dasharray: 4 3; }
.l0 { stroke: var(--line0); } .l1 { stroke: var(--line1); stroke-dasharray: 7 3; }
.l2 { stroke: var(--line2); stroke-dasharray: 2 3; }
.series { fill: none; stroke-width: 1.8; } .key { display: inline-block; vertical-align: middle; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; width: 100%; }
th, td { text-align: left; padding: .22rem .7rem .22rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 500; } td.n, th.n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
td.name { overflow-wrap: anywhere; } summary { cursor: pointer; margin: .8rem 0 .4rem; }
"""


def render(report: ParityReport) -> str:
    """Return the page."""
    verdict = "within tolerance" if report.ok else "over tolerance"
    stack = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Parity of {escape(report.name)}: {verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Parity of {escape(report.name)}</h1>",
        f'<p class="verdict {"good" if report.ok else "bad"}">{verdict.capitalize()}</p>',
        *(
            f'<p class="{"" if each.ok else "bad"}">{escape(line)}</p>'
            for each, line in zip(report.backends, report.summary().splitlines(), strict=True)
        ),
        f'<p class="dim">Eager PyTorch against the compiled step, from one state, on the same batches; {report.steps} '
        f"steps, {report.threads} threads, {escape(stack)}</p>",
        "<h2>Error over tolerance, by step</h2>",
        f"<p>{_legend(report.backends)}</p>",
        f'<div class="panels">{"".join(_panel(report, kind) for kind in KINDS)}</div>',
        '<p class="dim">The worst tensor of each kind, its error divided by what is allowed; above the dashed line at '
        "1 is over. An error of zero lies on the lower edge, one that is not finite on the upper.</p>",
        "<h2>Worst tensor of each kind</h2>",
        _table([(backend.backend, tensor) for backend, _, tensor in report.rows()]),
        *_all_tensors(report),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _legend(backends: Sequence[BackendReport]) -> str:
    return " ".join(
        f'<svg class="key" width="34" height="10" aria-hidden="true"><path class="series l{index % 3}" d="M2 5H32"/>'
        f"</svg> {escape(each.backend)}&ensp;"
        for index, each in enumerate(backends)
    )


def _panel(report: ParityReport, kind: Kind) -> str:
    """Return the SVG of one kind, or nothing where no backend has a tensor of it."""
    series = {index: _worst_by_step(backend.of_kind(kind)) for index, backend in enumerate(report.backends)}
    series = {index: values for index, values in series.items() if values}
    if not series:
        return ""
    logs = {index: [_log(value) for value in values] for index, values in series.items()}
    highest = max(1, *(math.ceil(each) for values in logs.values() for each in values if math.isfinite(each)))
    lines = "".join(
        f'<polyline class="series l{index % 3}" points="'
        + " ".join(
            f"{_x(step, report.steps):.1f},{_y(value, highest):.1f}" for step, value in enumerate(values, start=1)
        )
        + '"/>'
        for index, values in logs.items()
    )
    said = "; ".join(
        f"{report.backends[index].backend} at most {max(values):.2g} of the tolerance"
        for index, values in series.items()
    )
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{_y(exponent, highest) + 4:.1f}" text-anchor="end">{_power(exponent)}</text>'
        for exponent in sorted({LOWEST, -3, 0, highest})
    )
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{WORDS[kind]}: {said}")}">'
        f'<text class="head" x="{LEFT}" y="15">{WORDS[kind]}</text>'
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        f'<path class="tolerance" d="M{LEFT} {_y(0, highest):.1f}H{right}"/>{ticks}'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">step 1</text>'
        f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{report.steps}</text>{lines}</svg>'
    )


def _worst_by_step(tensors: Sequence[TensorReport]) -> list[float]:
    held = [each for each in tensors if not each.excluded]
    return [max(each.steps[step].ratio for each in held) for step in range(len(held[0].steps))] if held else []


def _log(ratio: float) -> float:
    if math.isnan(ratio):
        return math.inf
    return max(float(LOWEST), math.log10(ratio)) if ratio > 0 else float(LOWEST)


def _x(step: int, steps: int) -> float:
    return LEFT + (step - 1) / max(steps - 1, 1) * (WIDTH - LEFT - RIGHT)


def _y(exponent: float, highest: float) -> float:
    share = (min(exponent, highest) - LOWEST) / (highest - LOWEST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else f"1e{exponent}"


_HEADS = (
    ("kind", ""),
    ("tensor", ""),
    ("shape", ""),
    ("max abs", "n"),
    ("max rel", "n"),
    ("error / allowed", "n"),
    ("weighed", "n"),
    ("", ""),
)


def _table(rows: Sequence[tuple[str, TensorReport]]) -> str:
    heads = "".join(f'<th class="{style}">{name}</th>' for name, style in (("backend", ""), *_HEADS))
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>'
        f"{''.join(_row(backend, tensor) for backend, tensor in rows)}</tbody></table></div>"
    )


def _row(backend: str, tensor: TensorReport) -> str:
    worst, weighed = tensor.worst, max(each.weighed for each in tensor.steps)
    if tensor.excluded:
        state = f"excluded: {tensor.excluded}"
    elif tensor.first_over is not None:
        state = f"over at step {tensor.first_over}" + (f": {worst.note}" if worst.note else "")
    else:
        state = ""
    return (
        f"<tr><td>{escape(backend)}</td><td>{tensor.kind}</td>"
        f'<td class="name">{escape(tensor.name)}</td>'
        f"<td>{' × '.join(map(str, tensor.shape)) or 'scalar'} {escape(tensor.dtype)}</td>"
        f'<td class="n">{worst.max_abs:.2g}</td><td class="n">{worst.max_rel:.2g}</td>'
        f'<td class="n{"" if tensor.ok else " bad"}">{worst.ratio:.2g}</td>'
        f'<td class="n">{weighed or ""}</td><td>{escape(state)}</td></tr>'
    )


def _all_tensors(report: ParityReport) -> list[str]:
    found = [
        f"<details><summary>All {len(each.tensors)} tensors of {escape(each.backend)}, in the order the step computes "
        f"them</summary>{_table([(each.backend, tensor) for tensor in each.tensors])}</details>"
        for each in report.backends
    ]
    return [
        *found,
        '<p class="dim">Weighed: elements that may be further off because their gradient is rounding alone, which an '
        "adaptive optimizer turns into a step of ± lr. Max rel: the largest error over the tensor's largest value.</p>",
    ]
