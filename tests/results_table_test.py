#!/usr/bin/env python3
"""bench/results_table.py reads every record that is kept and draws charts that are XML."""

import json
import pathlib
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
                self.assertGreaterEqual(len(rows), len(report["benchmarks"]))

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

    def test_the_filter_and_a_missing_file(self):
        self.assertNotEqual(run(ROOT / "no_such_file.json").returncode, 0)
        result = run(*RECORDS, "--filter", "no such benchmark")
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(result.stdout, "")


if __name__ == "__main__":
    unittest.main()
