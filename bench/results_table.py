#!/usr/bin/env python3
"""Turns Google Benchmark JSON into Markdown tables and SVG bar charts.

usage: results_table.py FILE… [--filter TEXT] [--svg DIR] [--counter NAME]

FILE…      JSON records, e.g. bench/results/<gpu>/*.json
--filter   only benchmarks whose name contains TEXT
--svg      also writes one chart per group into DIR: DIR/<group>.svg
--counter  what the bars show (default: the median time in µs)

Benchmarks are grouped by the first part of their name ("select/64x8192/ties" belongs to "select").
Those of "topk" become tables with a column per entry, and charts per data set (topk_table.py).
Uses nothing but the standard library.
"""

import argparse
import html
import json
import pathlib
import re
import sys

import topk_table

COUNTERS = ["GB/s", "TFLOP/s"]
UNITS_IN_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def plain_name(name):
    """The name without what Google Benchmark appends."""
    return re.sub(r"/(iterations:\d+|manual_time|real_time|process_time|repeats:\d+)", "", name)


def median_us(run):
    if "median_us" in run:
        return run["median_us"]
    return run["real_time"] * UNITS_IN_US[run["time_unit"]]


def read(paths, text):
    """[(group, rest of the name, run)] in the order of the files, and their contexts."""
    rows, contexts = [], []
    for path in paths:
        report = json.loads(pathlib.Path(path).read_text())
        contexts.append(report["context"])
        for run in report["benchmarks"]:
            name = plain_name(run["name"])
            if run.get("run_type", "iteration") != "iteration" or text not in name:
                continue
            if run.get("error_occurred"):
                print(f"{name}: {run.get('error_message', 'failed')}", file=sys.stderr)
                continue
            group, _, rest = name.partition("/")
            rows.append((group, rest or group, run))
    return rows, contexts


def describe(context):
    parts = [context.get("gpu"), f"commit {context['commit']}" if "commit" in context else None]
    if "cuda_runtime" in context:
        parts.append(f"CUDA {context['cuda_runtime']}")
    parts.append(context.get("date", "")[:10])
    return ", ".join(part for part in parts if part)


def markdown(rows):
    """One table: name, entry, median and least time, the counters that any row has."""
    counters = [name for name in COUNTERS if any(name in run for _, _, run in rows)]
    lines = ["| case | entry | median µs | min µs |" + "".join(f" {name} |" for name in counters)]
    lines.append("|---|---|--:|--:|" + "--:|" * len(counters))
    for _, name, run in rows:
        least = f"{run['min_us']:.1f}" if "min_us" in run else "–"
        cells = [name, run.get("label", "") or "–", f"{median_us(run):.1f}", least]
        cells += [f"{run[counter]:,.0f}" if counter in run else "–" for counter in counters]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def svg(title, bars, unit):
    """Horizontal bars: [(name, value)]. Colours follow the reader's light or dark scheme."""
    row, left, width, head = 22, 260, 420, 40
    height = head + row * len(bars) + 12
    longest = max((value for _, value in bars), default=0) or 1
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{html.escape(title)}">',
        "<style>text{fill:#1b1f24}rect{fill:#3b7dd8}"
        "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}rect{fill:#6ea8fe}}</style>",
        f'<text x="8" y="22" font-size="14">{html.escape(title)}, {html.escape(unit)}</text>',
    ]
    for i, (name, value) in enumerate(bars):
        y = head + row * i
        length = max(value / longest * width, 1)
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        out.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{row - 6}"/>')
        out.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{value:,.4g}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--filter", default="")
    parser.add_argument("--svg", type=pathlib.Path)
    parser.add_argument("--counter")
    options = parser.parse_args()
    rows, contexts = read(options.files, options.filter)
    if not rows:
        print("no benchmark matches", file=sys.stderr)
        return 1
    print("; ".join(dict.fromkeys(describe(context) for context in contexts)))
    for group in dict.fromkeys(group for group, _, _ in rows):
        members = [row for row in rows if row[0] == group]
        if group == "topk":
            topk = [(name, median_us(run), run) for _, name, run in members]
            print(f"\n### {group}\n\n{topk_table.markdown(topk)}")
            if options.svg is not None:
                options.svg.mkdir(parents=True, exist_ok=True)
                for name, chart in topk_table.charts(topk).items():
                    (options.svg / f"{name}.svg").write_text(chart)
            continue
        print(f"\n### {group}\n\n{markdown(members)}")
        if options.svg is None:
            continue
        if options.counter:
            bars = [(name, run[options.counter]) for _, name, run in members if options.counter in run]
        else:
            bars = [(name, median_us(run)) for _, name, run in members]
        if bars:
            options.svg.mkdir(parents=True, exist_ok=True)
            chart = svg(group, bars, options.counter or "median µs")
            (options.svg / f"{group}.svg").write_text(chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
