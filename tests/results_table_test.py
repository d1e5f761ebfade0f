#!/usr/bin/env python3
"""bench/results_table.py reads every record that is kept and draws charts that are XML."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench/results_table.py"
RECORDS = sorted((ROOT / "bench/results/h200").glob("*.json"))


def run(*args):
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True)


class ResultsTable(unittest.TestCase):
    def test_every_record_becomes_a_table(self):
        self.assertTrue(RECORDS)
        for record in RECORDS:
            with self.subTest(record=record.name):
                report = json.loads(record.read_text())
                for key in ("gpu", "commit", "driver", "gpu_max_sm_clock_mhz"):
                    self.assertIn(key, report["context"])
                result = run(record)
                self.assertEqual(result.returncode, 0, result.stderr)
                rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
                # Top-k has a column per entry.
                lines = {re.sub("^topk/[^/]+/(un(?=hinted))?", "topk/", run["name"])
                         for run in report["benchmarks"] if not run.get("error_occurred")}
                self.assertGreaterEqual(len(rows), len(lines))

    def test_charts_are_xml_with_bars(self):
        with tempfile.TemporaryDirectory() as folder:
            result = run(*RECORDS, "--svg", folder)
            self.assertEqual(result.returncode, 0, result.stderr)
            charts = list(pathlib.Path(folder).glob("*.svg"))
            self.assertTrue(charts)
            for chart in charts:
                with self.subTest(chart=chart.name):
                    root = xml.etree.ElementTree.parse(chart).getroot()
                    self.assertTrue(root.tag.endswith("svg"))
                    self.assertTrue(root.findall(".//{*}rect"))

    def test_topk_has_a_column_per_entry_and_the_best_public_time(self):
        def timed(name, us, **counters):
            return {"name": f"topk/{name}/iterations:50/manual_time", "median_us": us, **counters}

        runs = [
            timed("auto/64x131072/k2048/ties", 17.45, **{"GB/s": 1922.9}),
            timed("cuda_radix/64x131072/k2048/ties", 87.0, **{"GB/s": 385.7}),
            timed("auto/4096x131072/k2048/normal/bf16", 600.0),
            timed("auto/64x131072/k512/normal", 15.0),
            timed("auto/128x262144/k2048/ties", 50.0),
            timed("auto/hinted/64x131072/overlap90", 14.0, overlap=0.9),
            timed("auto/unhinted/64x131072/overlap90", 28.0, overlap=0.9),
        ]
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder, "topk_gpu_bench.json")
            record.write_text(json.dumps({"context": {}, "benchmarks": runs}))
            result = run(record, "--svg", folder)
            self.assertEqual(result.returncode, 0, result.stderr)
            for line in (
                "| rows × length | auto | cuda_radix | best public | auto : best |",
                "| 64 × 131072 | 17.4 (1,923) | 87.0 (386) | 34.9 (961) | 0.50 |",
                "| 128 × 262144 | 50.0 | – | – | – |",
                "| 4096 × 131072 | 600.0 | 676.0 (1,588) | 0.89 |",
                "| 64 × 131072 | 15.0 |",
                "| 64 × 131072 | overlap90 | 90.0 % | auto | 14.0 | 28.0 | 0.50 |",
            ):
                self.assertIn(line, result.stdout.splitlines())
            charts = {path.stem: path for path in pathlib.Path(folder).glob("*.svg")}
            self.assertEqual(set(charts), {"topk_ties", "topk_ties_gbps", "topk_normal_bf16",
                                           "topk_normal_bf16_gbps"})
            for chart in charts.values():
                root = xml.etree.ElementTree.parse(chart).getroot()
                self.assertTrue(root.findall(".//{*}rect"))

    def test_the_filter_and_a_missing_file(self):
        self.assertNotEqual(run(ROOT / "no_such_file.json").returncode, 0)
        result = run(*RECORDS, "--filter", "no such benchmark")
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(result.stdout, "")


if __name__ == "__main__":
    unittest.main()
