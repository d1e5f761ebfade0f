#!/usr/bin/env python3
"""Prints the figures of a Google Benchmark JSON with their bounds: figures.py FILE…

A benchmark has a figure when it sets the counters figure, at_least, must and goal. Exit code 1 when
a must is missed.
"""

import json
import sys


def verdict(figure, bound, at_least):
    return figure >= bound if at_least else figure <= bound


def main(paths):
    rows, missed = [], 0
    for path in paths:
        with open(path) as file:
            report = json.load(file)
        for run in report["benchmarks"]:
            if "figure" not in run:
                continue
            name = run["name"].removesuffix("/iterations:1")
            sign = "≥" if run["at_least"] else "≤"
            met = "goal" if verdict(run["figure"], run["goal"], run["at_least"]) else "must"
            if not verdict(run["figure"], run["must"], run["at_least"]):
                met, missed = "MISSED", missed + 1
            rows.append(
                [name, f"{run['figure']:.3g}", f"{sign} {run['must']:g}", f"{sign} {run['goal']:g}", met]
            )
    header = ["figure", "got", "must", "goal", "met"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])] + [row[i].rjust(widths[i]) for i in range(1, 5)]
        print("  ".join(cells).rstrip())
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
