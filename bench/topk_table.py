"""Tables and charts of topk_gpu_bench's record, drawn by results_table.py: entries side by side."""

import html
import math
import re

# The fastest public kernel that was exact in the cell, k 2048, fp32, µs on an H200: rows × length →
# normal, narrow, ties. Different kernels, cell by cell; most keep no order among ties.
BEST_PUBLIC = {
    "1x8192": (7.1, 9.3, 9.7),
    "1x32768": (11.1, 14.4, 13.2),
    "1x131072": (13.5, 18.6, 14.7),
    "1x524288": (19.6, 25.8, 21.1),
    "16x32768": (12.5, 17.4, 14.8),
    "16x131072": (17.3, 25.8, 19.1),
    "64x8192": (7.6, 9.7, 10.0),
    "64x32768": (14.7, 21.5, 19.3),
    "64x131072": (24.3, 37.7, 34.9),
    "64x524288": (75.0, 78.1, 78.0),
    "128x262144": (55.9, None, None),
    "256x8192": (10.3, 16.2, 14.8),
    "256x32768": (23.2, 40.3, 30.9),
    "256x131072": (69.3, 74.1, 71.7),
    "1024x32768": (80.4, None, None),
    "1024x131072": (251, None, None),
    "4096x8192": (97.3, 197, 163),
    "4096x32768": (285, 522, 408),
    "4096x131072": (959, 1059, 979),
}
# The same for bf16.
BEST_PUBLIC_BF16 = {"64x131072": (25.0,), "4096x131072": (676.0,)}
BEST = "best public"
COLUMNS = {"normal": 0, "narrow": 1, "ties": 2}
PLAIN = re.compile(r"([^/]+)/(\d+x\d+)/(k\d+)/(.+)")
HINTED = re.compile(r"([^/]+)/(hinted|unhinted)/(\d+x\d+)/(.+)")
COLOURS = ["#3b7dd8", "#d9822b", "#3f9b5a", "#9b59b6", "#c0392b", "#7f8c8d", "#16a085", "#b7950b"]


def best_public(shape, k, data):
    """µs, or None where nobody is known to be exact."""
    kind, _, variant = data.partition("/")
    column = COLUMNS.get(kind)
    if k != "k2048" or column is None or variant not in ("", "bf16"):
        return None
    times = (BEST_PUBLIC_BF16 if variant else BEST_PUBLIC).get(shape, ())
    return times[column] if column < len(times) else None


def order(entries):
    """auto first, the best public last, the others as they came."""
    unique = list(dict.fromkeys(entries))
    return sorted(unique, key=lambda entry: {"auto": 0, BEST: 2}.get(entry, 1))


def select_groups(rows):
    """{(k, data): {shape: {entry: (µs, GB/s or None)}}} of the plain cases."""
    groups = {}
    for name, us, gbps in rows:
        match = PLAIN.fullmatch(name)
        if not match:
            continue
        entry, shape, k, data = match.groups()
        cells = groups.setdefault((k, data), {}).setdefault(shape, {})
        cells[entry] = us, gbps
        reference = best_public(shape, k, data)
        if reference:
            count, length = map(int, shape.split("x"))
            size = 2 if data.endswith("/bf16") else 4
            cells[BEST] = reference, count * length * size * 1e-3 / reference
    return groups


def cell(value):
    if value is None:
        return "–"
    us, gbps = value
    return f"{us:.1f}" if gbps is None else f"{us:.1f} ({gbps:,.0f})"


def select_table(shapes):
    entries = order(entry for cells in shapes.values() for entry in cells)
    ratio = "auto" in entries and BEST in entries
    lines = ["| rows × length | " + " | ".join(entries) + (" | auto : best |" if ratio else " |")]
    lines.append("|---|" + "--:|" * (len(entries) + ratio))
    for shape, cells in shapes.items():
        row = [shape.replace("x", " × "), *(cell(cells.get(entry)) for entry in entries)]
        if ratio:
            both = "auto" in cells and BEST in cells
            row.append(f"{cells['auto'][0] / cells[BEST][0]:.2f}" if both else "–")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def hinted_table(rows):
    """One line per entry, shape and change: with the hints, and auto without; empty if none."""
    times, overlaps = {}, {}
    for name, us, overlap in rows:
        match = HINTED.fullmatch(name)
        if match:
            entry, hinted, shape, change = match.groups()
            times.setdefault((shape, change), {})[entry, hinted] = us
            overlaps[shape, change] = overlap
    lines = []
    for (shape, change), cells in times.items():
        plain = cells.get(("auto", "unhinted"))
        for (entry, hinted), us in cells.items():
            if hinted == "hinted":
                ratio = [f"{plain:.1f}", f"{us / plain:.2f}"] if plain else ["–", "–"]
                overlap = overlaps[shape, change]
                kept = "–" if overlap is None else f"{100 * overlap:.1f} %"
                row = [shape.replace("x", " × "), change, kept, entry, f"{us:.1f}", *ratio]
                lines.append("| " + " | ".join(row) + " |")
    if not lines:
        return ""
    head = "| rows × length | change | overlap | entry | hinted, µs | auto unhinted, µs | ratio |"
    return "\n".join([head, "|---|---|--:|---|--:|--:|--:|", *lines])


def chart(title, unit, shapes, which):
    """Bars per shape, one colour per entry; the lengths are logarithms. `which`: 0 µs, 1 GB/s."""
    entries = order(entry for cells in shapes.values() for entry in cells)
    colours = {entry: COLOURS[i % len(COLOURS)] for i, entry in enumerate(entries)}
    row, left, width, head, gap = 12, 130, 520, 40 + 18 * math.ceil(len(entries) / 4), 8
    values = [value[which] for cells in shapes.values() for value in cells.values() if value[which]]
    if not values:
        return None
    low, high = min(values) / 1.5, max(values)
    bars, y = [], head
    for shape, cells in shapes.items():
        bars.append(f'<text x="{left - 8}" y="{y + 10}" text-anchor="end">'
                    f'{html.escape(shape.replace("x", " × "))}</text>')
        for entry in entries:
            value = cells.get(entry, (None, None))[which]
            if not value:
                continue
            length = math.log(value / low) / math.log(high / low) * width
            bars.append(f'<rect x="{left}" y="{y + 1}" width="{length:.1f}" height="{row - 2}" '
                        f'fill="{colours[entry]}"/>')
            bars.append(f'<text x="{left + length + 5:.1f}" y="{y + 10}">{value:,.4g}</text>')
            y += row
        y += gap
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 60} {y}" '
        f'font-family="sans-serif" font-size="10" role="img" aria-label="{html.escape(title)}">',
        "<style>text{fill:#1b1f24}@media(prefers-color-scheme:dark){text{fill:#e6e6e6}}</style>",
        f'<text x="8" y="20" font-size="14">{html.escape(title)}, {html.escape(unit)}, '
        "logarithmic</text>",
    ]
    for i, entry in enumerate(entries):
        x, key_y = 8 + 170 * (i % 4), 30 + 18 * (i // 4)
        out.append(f'<rect x="{x}" y="{key_y}" width="10" height="10" fill="{colours[entry]}"/>')
        out.append(f'<text x="{x + 15}" y="{key_y + 9}">{html.escape(entry)}</text>')
    return "\n".join([*out, *bars, "</svg>", ""])


def markdown(rows):
    """All tables. Rows are (name without "topk/", median µs, run)."""
    parts = []
    for (k, data), shapes in select_groups((n, us, run.get("GB/s")) for n, us, run in rows).items():
        parts.append(f"#### {data}, {k}: µs (GB/s)\n\n{select_table(shapes)}")
    hinted = hinted_table((n, us, run.get("overlap")) for n, us, run in rows)
    if hinted:
        parts.append(f"#### Hints of the step before\n\n{hinted}")
    return "\n\n".join(parts)


def charts(rows):
    """{file name without .svg: SVG}: times and throughputs of each data set at k 2048."""
    drawn = {}
    for (k, data), shapes in select_groups((n, us, run.get("GB/s")) for n, us, run in rows).items():
        if k != "k2048":
            continue
        name = "topk_" + data.replace("/", "_")
        for suffix, unit, which in (("", "median µs", 0), ("_gbps", "GB/s", 1)):
            picture = chart(f"top-k, {data}", unit, shapes, which)
            if picture:
                drawn[name + suffix] = picture
    return drawn
