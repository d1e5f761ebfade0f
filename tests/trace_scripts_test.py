#!/usr/bin/env python3
"""Tests of the scripts that write request traces: tools/make_sample_trace.py, convert_mooncake.py."""

import csv
import io
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "tools/traces/sample_chat.csv"


def run(script, *args, stdin=None):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / script, *args], input=stdin, capture_output=True
    )


class SampleTrace(unittest.TestCase):
    def test_the_generator_writes_the_shipped_file(self):
        result = run("make_sample_trace.py")
        self.assertEqual(result.stderr, b"")
        self.assertEqual(result.stdout, SAMPLE.read_bytes())

    def test_another_seed_writes_another_trace(self):
        self.assertNotEqual(run("make_sample_trace.py", "--seed", "2").stdout, SAMPLE.read_bytes())

    def test_lengths_follow_chat_traffic(self):
        # Every seed has to, not only the shipped one; large samples too.
        for args in ((), ("--seed", "2"), ("--requests", "5000", "--seed", "3")):
            text = run("make_sample_trace.py", *args).stdout.decode()
            rows = list(csv.DictReader(io.StringIO(text)))
            self.assertGreaterEqual(len(rows), 500)
            expected = {
                "context_len": {0.5: 512, 0.9: 12800, 0.99: 54000},
                "query_len": {0.5: 2500, 0.9: 19000},
            }
            for column, quantiles in expected.items():
                values = sorted(int(row[column]) for row in rows)
                for fraction, value in quantiles.items():
                    got = values[int(fraction * len(values))]
                    self.assertAlmostEqual(got / value, 1, delta=0.03, msg=(args, column, fraction))

            contexts = [int(row["context_len"]) for row in rows]
            self.assertTrue(all(context % 512 == 0 for context in contexts))
            self.assertIn(0, contexts)
            self.assertGreater(min(int(row["query_len"]) for row in rows), 0)
            self.assertGreater(min(int(row["output_len"]) for row in rows), 0)
            self.assertLessEqual(
                max(int(row["context_len"]) + int(row["query_len"]) for row in rows), 131072
            )
            times = [int(row["timestamp_ms"]) for row in rows]
            self.assertEqual(times, sorted(times))
            self.assertAlmostEqual(times[-1] / len(times), 294, delta=40)  # 3.4 requests a second


class ConvertMooncake(unittest.TestCase):
    def test_prefix_hits_become_context(self):
        result = run("convert_mooncake.py", ROOT / "tests/data/mooncake.jsonl")
        self.assertEqual(result.stderr, b"")
        self.assertEqual(
            result.stdout.decode().splitlines(),
            [
                "timestamp_ms,context_len,query_len,output_len",
                "0,0,1000,10",  # nothing is cached yet
                "0,999,1,20",  # all is: one token is left to compute
                "3000,1024,476,5",  # two full blocks
                "3000,511,1,7",  # exactly one block, and it is cached
                "6000,0,1600,1",  # the first block is new: later hits do not count
                "9000,1024,1024,0",  # the third is new: the fourth does not count
                "9001,0,1,3",
                "9002,0,1,3",  # cached, but its one token is left to compute
            ],
        )

    def test_bad_lines_are_named(self):
        good = '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]}\n'
        cases = {
            "{": ":2: not JSON: ",
            "[]": ":2: got a JSON list, expected an object",
            good.replace("timestamp", "time"): ":2: timestamp: missing",
            good.replace("513", "-1"): ":2: input_length: got -1, expected an integer of at least 1",
            good.replace("513", '"9"'): ":2: input_length: got '9', expected an integer",
            good.replace("[1, 2]", "[1]"): ":2: hash_ids: got 1 ids, expected 2 for 513 tokens",
            good.replace("[1, 2]", "7"): ":2: hash_ids: got 7, expected a list",
            good.replace("[1, 2]", "[1, [2]]"): ":2: hash_ids: got the id [2], expected integers",
        }
        for line, error in cases.items():
            result = run("convert_mooncake.py", "-", stdin=(good + line).encode())
            self.assertNotEqual(result.returncode, 0, line)
            self.assertEqual(len(result.stderr.decode().splitlines()), 1, result.stderr)
            self.assertIn("convert_mooncake: -" + error, result.stderr.decode())

    def test_a_missing_file_is_named(self):
        result = run("convert_mooncake.py", ROOT / "no such file")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("No such file", result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
