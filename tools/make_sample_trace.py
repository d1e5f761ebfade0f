#!/usr/bin/env python3
"""Writes the sample request trace that ships with sparse-mla (traces/sample_chat.csv).

The lengths are drawn, not recorded. They follow the quantiles of chat traffic with a prefix cache
of 512-token blocks: context median 512, p90 12,800, p99 54,000; query median 2,500, p90 19,000.
Each column is a stratified sample of its quantile function (one draw from each of N equal strata,
shuffled), so that even 500 requests meet the quantiles. Only +, −, ×, ÷ and the Mersenne Twister
are used, no library functions whose last bit may differ: every machine writes the same bytes.

    make_sample_trace.py [--requests N] [--seed N] > sample_chat.csv
"""

import argparse
import random
import sys

BLOCK = 512  # tokens per block of the prefix cache: contexts are multiples of it
MAX_SEQ_LEN = 131072  # prompt length limit of the service, context and query together

# Quantile functions: (fraction of the requests, length), linear between the knots, nearly flat
# around the quantiles that the sample promises. Most chats share one system prompt (the plateau at
# one block); follow-up turns find their history cached.
CONTEXT_KNOTS = (
    (0.00, 0),
    (0.12, 0),
    (0.121, 512),
    (0.62, 512),
    (0.75, 3600),
    (0.89, 12400),
    (0.91, 13200),
    (0.96, 28000),
    (0.985, 53600),
    (0.995, 54400),
    (1.00, 110000),
)
QUERY_KNOTS = (
    (0.00, 1),
    (0.01, 16),
    (0.10, 380),
    (0.25, 900),
    (0.50, 2500),
    (0.75, 8600),
    (0.89, 18700),
    (0.91, 19300),
    (0.99, 60000),
    (1.00, 100000),
)
OUTPUT_KNOTS = ((0.00, 1), (0.10, 25), (0.50, 350), (0.90, 600), (0.99, 1100), (1.00, 2000))

# Arrivals: a coin for every tick, so that gaps are geometric (Poisson-like), 3.4 requests a second.
TICK_MS = 20
ARRIVAL_PER_TICK = 0.068


def quantile(knots, fraction):
    for (x0, y0), (x1, y1) in zip(knots, knots[1:]):
        if fraction <= x1:
            return y0 + (y1 - y0) * ((fraction - x0) / (x1 - x0))
    return knots[-1][1]


def column(rng, knots, count, unit):
    values = [
        int(quantile(knots, (i + rng.random()) / count) / unit + 0.5) * unit for i in range(count)
    ]
    rng.shuffle(values)
    return values


def main():
    parser = argparse.ArgumentParser(description="Write a synthetic chat trace to stdout.")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests: got {args.requests}, expected at least 1")

    rng = random.Random(args.seed)
    contexts = column(rng, CONTEXT_KNOTS, args.requests, BLOCK)
    queries = column(rng, QUERY_KNOTS, args.requests, 1)
    outputs = column(rng, OUTPUT_KNOTS, args.requests, 1)

    out = sys.stdout
    out.reconfigure(newline="\n")
    out.write("timestamp_ms,context_len,query_len,output_len\n")
    timestamp = 0
    for context, query, output in zip(contexts, queries, outputs):
        query = min(query, MAX_SEQ_LEN - context)
        out.write(f"{timestamp},{context},{query},{output}\n")
        timestamp += TICK_MS
        while rng.random() >= ARRIVAL_PER_TICK:
            timestamp += TICK_MS


if __name__ == "__main__":
    main()
