#!/usr/bin/env python3
"""Writes kernels/common/path_table.h from a record of path_times.py: what a path costs where.

usage: path_table.py FILE [-o kernels/common/path_table.h]

FILE  JSON of bench/path_times.py
-o    where the table goes (default: standard output)

Costs are per head and pair of the masked path (a query token with a key that it sees), per head and
selected key of the sparse one, in picoseconds: between the grid's points they change little.
Uses nothing but the standard library.
"""

import argparse
import json
import pathlib
import re
import sys

from results_table import describe

TOPK = 2048
NAME = re.compile(r"path/(dense|masked|sparse)/(\d+)heads/(\d+)x(\d+)")


def pairs(query_len, seq_len):
    """Query tokens with keys that they see, of one request."""
    return query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2


def selected(query_len, seq_len):
    """The same with keys that are selected."""
    return sum(min(TOPK, seq_len - query_len + i + 1) for i in range(query_len))


def costs(runs):
    """{(heads, query_len, seq_len): {path: picoseconds per head and pair or key}}."""
    table = {}
    for run in runs:
        match = NAME.fullmatch(run["name"])
        if not match:
            raise ValueError(f"{run['name']}: expected a name like path/masked/16heads/128x4096")
        path, (heads, query_len, seq_len) = match[1], map(int, match.groups()[1:])
        work = selected(query_len, seq_len) if path == "sparse" else pairs(query_len, seq_len)
        if not (run["median_us"] > 0 and run["requests"] > 0):
            raise ValueError(f"{run['name']}: got {run['median_us']} µs of {run['requests']} "
                             "requests, expected more than 0 of both")
        table.setdefault((heads, query_len, seq_len), {})[path] = (
            run["median_us"] * 1e6 / (heads * run["requests"] * work))
    return table


def rows(table):
    """Lines of the header's table; ValueError where the record is no grid."""
    grid = [sorted({shape[axis] for shape in table}) for axis in range(3)]
    lines = []
    for heads in grid[0]:
        for query_len in grid[1]:
            for seq_len in grid[2]:
                of_path = table.get((heads, query_len, seq_len), {})
                if not {"masked", "sparse"} <= set(of_path):
                    raise ValueError(f"{heads} heads, query_len {query_len}, seq_len {seq_len}: "
                                     "expected in the record on both paths")
                lines.append(f"    {{{of_path['masked']:.4g}, {of_path['sparse']:.4g}}},  "
                             f"// {heads} heads, {query_len} × {seq_len}")
    if any(len(values) < 2 for values in grid):
        raise ValueError(f"got a grid of {' × '.join(str(len(values)) for values in grid)} points, "
                         "expected two at least on each axis")
    return grid, lines


def header(grid, lines, source):
    axes = "\n".join(f"inline constexpr int kPath{name}[] = {{{', '.join(map(str, values))}}};"
                     for name, values in zip(["Heads", "QueryLens", "SeqLens"], grid))
    body = "\n".join(lines)
    return f"""\
/// Written by bench/path_table.py: {source}.
#pragma once

namespace sparse_mla {{

/// Picoseconds per head: of the masked path for each pair of a query token and a key that it sees,
/// of the sparse path for each selected key.
struct PathCost {{
  float masked, sparse;
}};

// clang-format off
{axes}
/// By heads, query length and sequence length, the last one fastest.
inline constexpr PathCost kPathCosts[] = {{
{body}
}};
// clang-format on

}}  // namespace sparse_mla
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    options = parser.parse_args()
    try:
        record = json.loads(options.file.read_text())
        grid, lines = rows(costs(record["benchmarks"]))
        text = header(grid, lines, describe(record["context"]))
    except (KeyError, OSError, ValueError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
