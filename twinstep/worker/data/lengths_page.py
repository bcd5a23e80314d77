"""A study of history lengths as one HTML page that loads nothing: a picture of the histogram, and tables. Pure."""

from __future__ import annotations

from html import escape

from twinstep.worker.data.budget import BudgetUse
from twinstep.worker.data.lengths import LengthStudy

WIDTH, HEIGHT = 640, 240  # of the picture, in pixels at scale 1
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 34  # margins around its axes
GAP = 3  # pixels between bars

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1c1f24; --dim: #5c6470; --rule: #d8dce2; --bar: #1f5fbf;
  --mark: #b3540b; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --ink: #e6e9ed; --dim: #9aa4b0; --rule: #343a42;
  --bar: #7ab0ff; --mark: #ffac66; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 46rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } p { margin: .3rem 0; } .dim { color: var(--dim); }
svg { width: 100%; height: auto; margin: 1rem 0; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
.axis { stroke: var(--rule); fill: none; } .bar { fill: var(--bar); }
.mark { stroke: var(--mark); stroke-width: 1.6; stroke-dasharray: 4 3; }
svg text.mark { fill: var(--mark); stroke: none; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: right; padding: .25rem 0 .25rem .9rem; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--dim); font-weight: 500; }
"""


def render(study: LengthStudy) -> str:
    """Return the page."""
    name = escape(study.name)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Histories of {name}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Histories of {name}</h1>",
            f'<p class="dim">{study.train_samples:,} training samples of {study.users:,} users; at most the newest '
            f"{study.uih_len} events of each; batches of {study.batch_size}.</p>",
            picture(study),
            "<table><tr><th>batches with</th><th>uih_budget</th><th>padded tokens</th><th>events lost</th>"
            "<th>batches that lose some</th></tr>",
            f"<tr><td>every history padded to uih_len</td><td>{study.uih_len}</td><td>{study.padded_slots:.1%}</td>"
            "<td>0.0%</td><td>0.0%</td></tr>",
            _row("the spec's budget", study.current),
            _row("the recommended budget", study.recommended),
            "</table>",
            f'<p class="dim">Recommended: the least budget that loses at most {study.target_loss:.2%} of the events.'
            "</p>",
            "</body></html>\n",
        )
    )


def _row(says: str, use: BudgetUse) -> str:
    return (
        f"<tr><td>{says}</td><td>{use.budget}</td><td>{use.padded:.1%}</td><td>{use.lost:.2%}</td>"
        f"<td>{use.batches_cut:.1%}</td></tr>"
    )


def picture(study: LengthStudy) -> str:
    """Return the histogram as an SVG picture, with the recommended budget as a line."""
    most = max(1, *(count for _, _, count in study.histogram))
    width = (WIDTH - LEFT - RIGHT) / len(study.histogram)
    floor = HEIGHT - BOTTOM
    bars, labels = [], []
    for i, (low, high, count) in enumerate(study.histogram):
        x, height = LEFT + i * width, (floor - TOP) * count / most
        bars.append(
            f'<rect class="bar" x="{x + GAP / 2:.1f}" y="{floor - height:.1f}" width="{width - GAP:.1f}" '
            f'height="{height:.1f}"><title>{low} to {high} events: {count:,} samples</title></rect>'
        )
        if i % 2 == 0:
            labels.append(f'<text x="{x + GAP / 2:.1f}" y="{floor + 14}">{low}</text>')
    bin_width = study.histogram[0][1] - study.histogram[0][0] + 1
    mark = LEFT + width * study.recommended.budget / bin_width
    near_end = mark > WIDTH * 0.7
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Histogram of history lengths: mean '
        f'{study.mean:.1f}, recommended budget {study.recommended.budget}">'
        f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}"/>{"".join(bars)}{"".join(labels)}'
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{most:,}</text>'
        f'<text x="{LEFT - 6}" y="{floor + 4}" text-anchor="end">0</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">events in the history</text>'
        f'<path class="mark" d="M{mark:.1f} {TOP - 8}V{floor}"/>'
        f'<text class="mark" x="{mark + (-5 if near_end else 5):.1f}" y="{TOP - 12}" '
        f'text-anchor="{"end" if near_end else "start"}">uih_budget {study.recommended.budget}</text></svg>'
    )
