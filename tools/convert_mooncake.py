#!/usr/bin/env python3
"""Converts a request trace of the public Mooncake FAST'25 release to the CSV that sparse-mla reads.

    convert_mooncake.py conversation_trace.jsonl > conversation_trace.csv

Input (github.com/kvcache-ai/Mooncake, FAST25-release/traces), one JSON object a line: `timestamp`
in ms, `input_length` and `output_length` in tokens, and `hash_ids`, one id for every 512 tokens of
the prompt (the last block may be partial). Equal ids mean equal prompts up to and including that
block.

Output: `context_len` is the leading part of the prompt whose blocks occurred in earlier requests,
as an unlimited prefix cache would find it; at least one token is left to compute. `query_len` is
the rest of the prompt.
"""

import argparse
import json
import sys

BLOCK = 512  # tokens per hash id
HEADER = "timestamp_ms,context_len,query_len,output_len"


class BadTrace(Exception):
    pass


def whole_number(row, field, minimum):
    if field not in row:
        raise BadTrace(f"{field}: missing")
    value = row[field]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BadTrace(f"{field}: got {value!r}, expected an integer of at least {minimum}")
    return value


def convert_row(line, seen):
    """One line of JSON to one line of CSV; adds the row's block hashes to `seen`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadTrace(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadTrace(f"got a JSON {type(row).__name__}, expected an object")
    timestamp = whole_number(row, "timestamp", 0)
    input_len = whole_number(row, "input_length", 1)
    output_len = whole_number(row, "output_length", 0)
    hash_ids = row.get("hash_ids")
    blocks = -(-input_len // BLOCK)
    if not isinstance(hash_ids, list):
        raise BadTrace(f"hash_ids: got {hash_ids!r}, expected a list")
    if len(hash_ids) != blocks:
        raise BadTrace(
            f"hash_ids: got {len(hash_ids)} ids, expected {blocks} for {input_len} tokens"
        )
    for hash_id in hash_ids:
        if isinstance(hash_id, bool) or not isinstance(hash_id, (int, str)):
            raise BadTrace(f"hash_ids: got the id {hash_id!r}, expected integers or strings")

    hits = 0
    while hits < blocks and hash_ids[hits] in seen:
        hits += 1
    seen.update(hash_ids)
    context_len = min(hits * BLOCK, input_len - 1)
    return f"{timestamp},{context_len},{input_len - context_len},{output_len}"


def main():
    parser = argparse.ArgumentParser(
        description="Convert a Mooncake FAST'25 request trace (JSON lines) to sparse-mla's CSV."
    )
    parser.add_argument("input", help="JSON lines file, or - for stdin")
    args = parser.parse_args()
    try:
        stream = sys.stdin if args.input == "-" else open(args.input, encoding="utf-8")
    except OSError as error:
        sys.exit(f"convert_mooncake: {args.input}: {error.strerror}")

    sys.stdout.reconfigure(newline="\n")
    print(HEADER)
    seen = set()
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                print(convert_row(line, seen))
            except BadTrace as error:
                sys.exit(f"convert_mooncake: {args.input}:{number}: {error}")


if __name__ == "__main__":
    main()
