#!/usr/bin/env python3
"""Writes topk/choice_table.h from topk_gpu_bench's record: which selector is the fastest where.

usage: topk_choice.py FILE [-o topk/choice_table.h]

FILE  Google Benchmark JSON with the entries cuda_cta, cuda_cluster, cuda_stream and cuda_radix (and
      sizes of them, such as cuda_cluster8) at k 2048, fp32
-o    where the table goes (default: standard output)

A shape belongs to the selector with the least geometric mean of medians over the shape's data sets;
an entry that failed on one of them takes no part. Counts of rows and lengths that were not measured
together take the selector of the nearest shape that was. Between two measured counts or lengths the
border is their geometric mean.
Uses nothing but the standard library.
"""

import argparse
import json
import math
import pathlib
import re
import sys

from results_table import describe, median_us, plain_name

SELECTORS = ["cta", "cluster", "stream", "radix"]
MAX_CTA_ROW_LEN = 16384  # topk/choice.h
NAME = re.compile(r"topk/cuda_([a-z]+)\d*/(\d+)x(\d+)/k2048/([a-z]+)")


def read(report):
    """{(rows, len): {entry: {data: µs}}} of the library's own selectors."""
    cells = {}
    for run in report["benchmarks"]:
        name = plain_name(run["name"])
        match = NAME.fullmatch(name)
        if not match or match[1] not in SELECTORS or run.get("error_occurred"):
            continue
        shape = int(match[2]), int(match[3])
        entry = name.split("/")[1]
        cells.setdefault(shape, {}).setdefault(entry, {})[match[4]] = median_us(run)
    return cells


def fastest(entries):
    """The selector of a shape: {entry: {data: µs}}."""
    data = set().union(*entries.values())
    means = {}
    for entry, times in entries.items():
        if set(times) == data:
            means[entry] = math.prod(times.values()) ** (1 / len(times))
    best = min(means, key=means.get)
    return re.fullmatch(r"cuda_([a-z]+)\d*", best)[1]


def nearest(measured, shape):
    """The selector of the measured shape nearest to `shape`; lengths tell far more than counts."""

    def distance(other):
        return abs(math.log2(other[0] / shape[0])) + 4 * abs(math.log2(other[1] / shape[1]))

    return measured[min(sorted(measured), key=distance)]


def borders(values):
    """Where each of ascending values begins: 0, then the geometric means."""
    means = [round(math.sqrt(a * b)) for a, b in zip(values, values[1:])]
    return [0, *means]


def table(measured):
    """[(rows from, length from, selector)], equal neighbours merged."""
    rows = sorted({shape[0] for shape in measured})
    lengths = sorted({shape[1] for shape in measured})
    groups = []
    for count, rows_from in zip(rows, borders(rows)):
        group = []
        for length, length_from in zip(lengths, borders(lengths)):
            selector = nearest(measured, (count, length))
            if not group or group[-1][1] != selector:
                if group and group[-1][1] == "cta":  # which holds no longer rows
                    length_from = min(length_from, MAX_CTA_ROW_LEN + 1)
                group.append((length_from, selector))
        if not groups or groups[-1][1] != group:
            groups.append((rows_from, group))
    return [(start, length, name) for start, group in groups for length, name in group]


def header(lines, source):
    body = "\n".join(f"    {{{rows}, {length}, Selector::{name}}}," for rows, length, name in lines)
    return f"""\
/// Written by bench/topk_choice.py: {source}.
#pragma once

#include "topk/selectors.h"

namespace sparse_mla::topk {{

// clang-format off
inline constexpr ChoiceRow kChoiceTable[] = {{
{body}
}};
// clang-format on

}}  // namespace sparse_mla::topk
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    options = parser.parse_args()
    report = json.loads(options.file.read_text())
    cells = read(report)
    if not cells:
        print("no selector of the library's own in the record", file=sys.stderr)
        return 1
    measured = {shape: fastest(entries) for shape, entries in cells.items()}
    text = header(table(measured), describe(report["context"]))
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
