#!/usr/bin/env python3
"""bench/path_times.py and bench/path_table.py: measured times become the table of path costs."""

import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = sys.argv.pop(1)
sys.path.insert(0, str(ROOT / "bench"))
path_table = importlib.import_module("path_table")


def run_of(path, heads, query_len, seq_len, requests=1, us=1000.0):
    return {"name": f"path/{path}/{heads}heads/{query_len}x{seq_len}", "median_us": us,
            "requests": requests}


class PathTable(unittest.TestCase):
    def test_pairs_are_counted(self):
        for query_len, seq_len in ((1, 1), (3, 3), (5, 100), (4, 2049), (7, 5000)):
            keys = range(seq_len - query_len + 1, seq_len + 1)
            self.assertEqual(path_table.pairs(query_len, seq_len), sum(keys))
            self.assertEqual(path_table.selected(query_len, seq_len),
                             sum(min(2048, visible) for visible in keys))

    def test_costs_are_per_head_pair_and_request(self):
        table = path_table.costs([run_of("masked", 16, 10, 5000, requests=3, us=2000.0),
                                  run_of("sparse", 16, 10, 5000, requests=3, us=500.0)])
        of_path = table[16, 10, 5000]
        self.assertAlmostEqual(of_path["masked"] * 16 * 3 * path_table.pairs(10, 5000), 2.0e9,
                               delta=1)
        self.assertAlmostEqual(of_path["sparse"] * 16 * 3 * 10 * 2048, 0.5e9, delta=1)

    def test_a_record_that_is_no_grid_is_refused(self):
        both = [run_of(path, 16, *shape) for path in ("masked", "sparse")
                for shape in ((10, 5000), (20, 6000))]
        with self.assertRaisesRegex(ValueError, "16 heads, query_len 10, seq_len 6000"):
            path_table.rows(path_table.costs(both))
        with self.assertRaisesRegex(ValueError, "16 heads, query_len 10, seq_len 5000"):
            path_table.rows(path_table.costs(both[:1]))
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "record.json")
            corner = [run_of(path, 16, 10, 5000) for path in ("masked", "sparse")]
            grid = [run_of(path, heads, query_len, seq_len, us=0.0)
                    for path in ("masked", "sparse") for heads in (1, 2)
                    for query_len in (1, 2) for seq_len in (8, 9)]
            for runs in (both, [], [{"name": "attend/dense"}], [{}], corner, grid):
                source.write_text(json.dumps({"context": {}, "benchmarks": runs}))
                script = [sys.executable, ROOT / "bench/path_table.py", source]
                run = subprocess.run(script, capture_output=True, text=True)
                self.assertEqual(run.returncode, 1)
                self.assertEqual(run.stdout, "")
                self.assertNotIn("Traceback", run.stderr)
                self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)

    def test_times_of_the_tool_become_a_header(self):
        with tempfile.TemporaryDirectory() as folder:
            record, target = pathlib.Path(folder, "times.json"), pathlib.Path(folder, "table.h")
            subprocess.run([sys.executable, ROOT / "bench/path_times.py", TOOL, "--backend", "cpu",
                            "--heads", "1,2", "--query-lens", "1024,2048", "--seq-lens",
                            "2048,2304", "--context", "gpu=none", "-o", record], check=True)
            runs = json.loads(record.read_text())["benchmarks"]
            self.assertEqual(len({run["name"] for run in runs}), len(runs))
            for run in runs:
                self.assertEqual(run["requests"], 2 if "/1024x" in run["name"] else 1)
                self.assertGreater(run["median_us"], 0)
            subprocess.run([sys.executable, ROOT / "bench/path_table.py", record, "-o", target],
                           check=True)
            text = target.read_text()
            self.assertIn("by bench/path_table.py: none, 20", text)
            self.assertIn("kPathQueryLens[] = {1024, 2048};", text)
            self.assertIn("// 2 heads, 2048 × 2304", text)

    def test_the_table_is_the_recorded_one(self):
        record_of_h200 = ROOT / "bench/results/h200/path_times.json"
        script = [sys.executable, ROOT / "bench/path_table.py", record_of_h200]
        written = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        self.assertEqual((ROOT / "kernels/common/path_table.h").read_text(), written)


if __name__ == "__main__":
    unittest.main()
