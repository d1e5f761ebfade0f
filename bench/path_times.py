#!/usr/bin/env python3
"""Measures how long prefill takes on each path, by heads, query length and sequence length.

usage: path_times.py SPARSE_MLA [-o FILE] [--backend cuda] [--heads 8,16,64,128]
                     [--query-lens 16,128,1024] [--seq-lens 4096,16384,65536]

SPARSE_MLA  the command-line tool
-o          where the record goes (JSON as Google Benchmark's; default: standard output)

A batch has equal requests, at most 2,048 new tokens and 2^19 rows of context; picks are drawn at
random and handed in, so that what both paths share is left out. A time is the median of the runs
that `sparse-mla run --compare-paths` makes of a path. bench/path_table.py makes the
choice's table of the record.
Uses nothing but the standard library.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

TOKENS = 2048
CONTEXT_ROWS = 1 << 19


def numbers(text):
    return [int(word) for word in text.split(",")]


def measure(tool, backend, heads, query_len, seq_len):
    """One point of the grid: a run of run_layer for each path."""
    requests = max(1, min(TOKENS // query_len, CONTEXT_ROWS // seq_len))
    command = [tool, "run", "--backend", backend, "--heads", str(heads), "--selection", "random",
               "--spec", f"{requests}q{query_len}s{seq_len}", "--compare-paths", "--json"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    (taken,) = json.loads(run.stdout)["paths"].values()
    return [{"name": f"path/{path}/{heads}heads/{query_len}x{seq_len}", "run_type": "iteration",
             "median_us": ms * 1e3, "requests": requests}
            for path, ms in taken["ms_of_path"].items()]


def gpu_context():
    """What the GPU benchmarks' records say of the card, as nvidia-smi knows it."""
    fields = {"gpu": "name", "driver": "driver_version", "gpu_max_sm_clock_mhz": "clocks.max.sm",
              "gpu_max_memory_clock_mhz": "clocks.max.mem"}
    run = subprocess.run(["nvidia-smi", "--query-gpu=" + ",".join(fields.values()),
                          "--format=csv,noheader,nounits", "--id=0"],
                         check=True, capture_output=True, text=True)
    return dict(zip(fields, (field.strip() for field in run.stdout.split(","))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("tool")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--heads", type=numbers, default=[8, 16, 64, 128])
    parser.add_argument("--query-lens", type=numbers, default=[16, 128, 1024])
    parser.add_argument("--seq-lens", type=numbers, default=[4096, 16384, 65536])
    parser.add_argument("--context", action="append", default=[], metavar="KEY=VALUE",
                        help="of the record, such as commit=…, driver=…")
    options = parser.parse_args()
    context = gpu_context() if options.backend == "cuda" else {}
    context.update(entry.split("=", 1) for entry in options.context)
    context["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    runs = [run for heads in options.heads for query_len in options.query_lens
            for seq_len in options.seq_lens
            for run in measure(options.tool, options.backend, heads, query_len, seq_len)]
    text = json.dumps({"context": context, "benchmarks": runs}, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
