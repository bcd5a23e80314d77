"""A captured step as one picture: lanes for inputs, forward, backward, update and results; a box for each module.

The graph of a whole step has thousands of nodes; here a box stands for all nodes of one module (or one optimizer) in
one lane, and a line for all values that one box hands another. Backward boxes stand below their forward ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from torch import fx

from twinstep.spec.words import BIDIRECTIONAL, CONTROLS
from twinstep.worker.compile.annotate import ROLES, Annotations, Role, Value
from twinstep.worker.compile.explain import size

LANES = ("input", "forward", "backward", "update", "result")
MOST_BOXES = 14  # in a lane; more would not be read
BOX_W, BOX_H, GAP_X, GAP_Y, LEFT, TOP = 156, 46, 22, 84, 92, 64  # pixels

COLOURS: Mapping[Role, str] = {
    "table": "#f2b134",
    "parameter": "#f6d88a",
    "buffer": "#d9d2c5",
    "optimizer state": "#c9b7e0",
    "learning rate": "#e3b7d4",
    "batch": "#8fc7e8",
    "constant": "#e4e4e4",
    "activation": "#a9d8a2",
    "gradient": "#f2a59a",
    "update": "#b9a3dc",
    "new state": "#f2cf63",
    "output": "#6fb3d9",
}


@dataclass(slots=True)
class Box:
    """What is drawn as one."""

    lane: str
    name: str
    role: Role
    values: list[Value] = field(default_factory=list)
    first: int = 0
    """Position of its first node in the graph."""
    x: float = 0.0
    y: float = 0.0


def draw(graph: fx.Graph, annotations: Annotations, *, title: str) -> str:
    """Return the picture as a self-contained SVG document."""
    of_node, boxes = _boxes(annotations)
    links: Counter[tuple[int, int]] = Counter()
    weights: Counter[tuple[int, int]] = Counter()
    values = annotations.by_name()
    for node in graph.nodes:
        if node.name not in of_node:
            continue
        for each in node.all_input_nodes:
            if each.name in of_node and of_node[each.name] is not of_node[node.name]:
                pair = id(of_node[each.name]), id(of_node[node.name])
                links[pair] += 1
                weights[pair] += values[each.name].bytes
    width = _lay_out(boxes)
    height = TOP + len(LANES) * (BOX_H + GAP_Y) + 40
    by_id = {id(box): box for box in boxes}
    lines = [_line(by_id[a], by_id[b], count, weights[a, b]) for (a, b), count in links.items()]
    total = sum(len(box.values) for box in boxes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{_text(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="600">{_text(title)}</text>',
        f'<text x="16" y="42" fill="#555555">{total} values in {len(boxes)} boxes; a line is what one hands another, '
        "the wider the more bytes</text>",
        *_lanes(width),
        '<g fill="none">',
        *lines,
        "</g>",
        *map(_drawn, boxes),
        *_legend({box.role for box in boxes}, height - 22),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _boxes(annotations: Annotations) -> tuple[dict[str, Box], list[Box]]:
    """Return the box of each value by its node's name, and all boxes."""
    keys: dict[str, tuple[str, str, Role]] = {}
    for value in annotations.values:
        keys[value.name] = _key(value)
    for lane in LANES:
        names = {value.name: keys[value.name][1] for value in annotations.values if keys[value.name][0] == lane}
        shown = _collapsed(names.values())
        for node, name in names.items():
            keys[node] = (lane, shown[name], keys[node][2])
    boxes: dict[tuple[str, str], Box] = {}
    of_node: dict[str, Box] = {}
    for index, value in enumerate(annotations.values):
        lane, name, role = keys[value.name]
        box = boxes.setdefault((lane, name), Box(lane, name, role, first=index))
        box.values.append(value)
        of_node[value.name] = box
    return of_node, list(boxes.values())


def _key(value: Value) -> tuple[str, str, Role]:
    if value.stage == "input":
        return (
            "input",
            value.label if value.role == "table" else f"{value.role}s".replace("batchs", "batch"),
            value.role,
        )
    if value.role in ("new state", "output"):
        return "result", "new state" if value.role == "new state" else "outputs", value.role
    roles: Mapping[str, Role] = {"forward": "activation", "backward": "gradient", "update": "update"}
    return value.stage, value.region or "(step)", roles[value.stage]


def _collapsed(names: Iterable[str]) -> dict[str, str]:
    """Return for each name a shorter one, so that there are at most MOST_BOXES: outer modules stand for inner ones."""
    counts = Counter(names)
    deepest = max((name.count(".") + 1 for name in counts), default=1)
    shown = {name: name for name in counts}
    for depth in range(deepest, 0, -1):
        shown = {name: ".".join(name.split(".")[:depth]) for name in counts}
        if len(set(shown.values())) <= MOST_BOXES:
            return shown
    totals: Counter[str] = Counter()
    for name, count in counts.items():
        totals[shown[name]] += count
    kept = {name for name, _ in totals.most_common(MOST_BOXES - 1)}
    rest = f"{len(totals) - len(kept)} more"
    return {name: short if short in kept else rest for name, short in shown.items()}


def _lay_out(boxes: list[Box]) -> float:
    """Give each box its place; return the width of the picture."""
    lanes: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        lanes[box.lane].append(box)
    column = {box.name: index for index, box in enumerate(sorted(lanes["forward"], key=lambda box: box.first))}
    widest = max(map(len, lanes.values()), default=1)
    for number, lane in enumerate(LANES):
        # The backward pass runs from the end to the start: a module's two boxes stand one above the other.
        if lane == "backward":
            order = sorted(lanes[lane], key=lambda box: (column.get(box.name, widest), -box.first))
        else:
            order = sorted(lanes[lane], key=lambda box: box.first)
        step = (BOX_W + GAP_X) * widest / max(len(order), 1)
        aligned = lane == "backward" and all(box.name in column for box in order)
        for index, box in enumerate(order):
            place = column[box.name] * (BOX_W + GAP_X) * widest / len(column) if aligned else index * step
            box.x, box.y = LEFT + place, TOP + number * (BOX_H + GAP_Y)
    return LEFT + (BOX_W + GAP_X) * max(widest, 5)


def _line(start: Box, end: Box, count: int, weight: int) -> str:
    thick = 0.6 + min(3.4, math.log10(max(weight, 1)) / 3)
    tip = f"{start.name} → {end.name}: {count} values, {size(weight)}"
    x1, x2 = start.x + BOX_W / 2, end.x + BOX_W / 2
    if start.lane == end.lane:
        away = 18 + min(46.0, abs(x2 - x1) / 16)
        y = start.y if start.lane != "backward" else start.y + BOX_H
        bend = y - away if start.lane != "backward" else y + away
        path = f"M{x1:.0f} {y:.0f} C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {y:.0f}"
    else:
        down = start.y < end.y
        y1, y2 = (start.y + BOX_H, end.y) if down else (start.y, end.y + BOX_H)
        middle = (y1 + y2) / 2
        path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
    return (
        f'<path d="{path}" stroke="{COLOURS[start.role]}" stroke-width="{thick:.1f}" stroke-opacity="0.75">'
        f"<title>{_text(tip)}</title></path>"
    )


def _drawn(box: Box) -> str:
    total = sum(value.bytes for value in box.values)
    ops = Counter(value.op for value in box.values if value.op != "placeholder")
    tip = [f"{box.lane}: {box.name}", f"{len(box.values)} values, {size(total)}"]
    tip += [f"{count} {op}" for op, count in ops.most_common(8)]
    name = box.name if len(box.name) <= 23 else "…" + box.name[-22:]
    return (
        f"<g class={quoteattr(box.lane)}><title>{_text(chr(10).join(tip))}</title>"
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{BOX_W}" height="{BOX_H}" rx="6" fill="{COLOURS[box.role]}" '
        'stroke="#555555" stroke-width="0.8"/>'
        f'<text x="{box.x + BOX_W / 2:.0f}" y="{box.y + 19:.0f}" text-anchor="middle">{_text(name)}</text>'
        f'<text x="{box.x + BOX_W / 2:.0f}" y="{box.y + 36:.0f}" text-anchor="middle" fill="#444444" font-size="11">'
        f"{len(box.values)} values · {size(total)}</text></g>"
    )


def _lanes(width: float) -> list[str]:
    found = []
    for number, lane in enumerate(LANES):
        y = TOP + number * (BOX_H + GAP_Y) - 20
        shade = "#f7f7f7" if number % 2 else "#fbfbfb"
        found.append(f'<rect x="0" y="{y}" width="{width:.0f}" height="{BOX_H + 40}" fill="{shade}"/>')
        found.append(f'<text x="16" y="{y + 46}" font-weight="600" fill="#333333">{lane}</text>')
    return found


def _legend(roles: set[Role], y: float) -> list[str]:
    found, x = [], 16
    for role in ROLES:
        if role in roles:
            found.append(f'<rect x="{x}" y="{y - 11:.0f}" width="14" height="14" rx="3" fill="{COLOURS[role]}"/>')
            found.append(f'<text x="{x + 20}" y="{y:.0f}">{role}</text>')
            x += 36 + 7 * len(role)
    return found


_UNFIT = dict.fromkeys(BIDIRECTIONAL | (CONTROLS - {0x0A}), 0xFFFD)


def _text(text: str) -> str:
    """Return text as XML holds it: escaped, without characters that XML does not allow."""
    return escape(text.translate(_UNFIT).encode("utf-8", "replace").decode())
