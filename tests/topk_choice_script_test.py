#!/usr/bin/env python3
"""bench/topk_choice.py: the fastest selector per shape becomes a table."""

import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
topk_choice = importlib.import_module("topk_choice")

TIMES = {  # (rows, len): {entry: µs}
    (1, 8192): {"cuda_cta": 5, "cuda_cluster": 7, "cuda_radix": 14},
    (1, 131072): {"cuda_cta": 60, "cuda_cluster": 11, "cuda_cluster8": 9, "cuda_radix": 81},
    (64, 131072): {"cuda_cluster": 30, "cuda_stream": 20, "cuda_radix": 82},
    (64, 32768): {"cuda_cluster": 12, "cuda_stream": 13, "cuda_radix": 30},
}


def record():
    runs = [
        {"name": f"topk/{entry}/{rows}x{length}/k2048/{data}/iterations:50/manual_time",
         "median_us": us * scale}
        for (rows, length), entries in TIMES.items()
        for entry, us in entries.items()
        for data, scale in (("normal", 1.0), ("ties", 1.5))
    ]
    # None of these has a say.
    runs += [
        {"name": "topk/auto/1x8192/k2048/normal/iterations:50/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_thrust_sort/1x8192/k2048/normal/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_radix/1x8192/k512/normal/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_radix/1x8192/k2048/normal/bf16/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_radix/1x8192/k2048/normal/cold/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_stream/1x131072/k2048/normal/manual_time", "median_us": 1.0},
        {"name": "topk/cuda_stream/1x131072/k2048/ties/manual_time", "median_us": 1.0,
         "error_occurred": True},
    ]
    return {"context": {"gpu": "a GPU", "date": "2026-01-02T03:04"}, "benchmarks": runs}


class TopkChoice(unittest.TestCase):
    def test_the_least_mean_wins_and_one_that_failed_does_not(self):
        cells = topk_choice.read(record())
        self.assertEqual(set(cells), set(TIMES))
        winners = {shape: topk_choice.fastest(entries) for shape, entries in cells.items()}
        self.assertEqual(winners, {(1, 8192): "cta", (1, 131072): "cluster",
                                   (64, 131072): "stream", (64, 32768): "cluster"})

    def test_borders_are_geometric_means_and_gaps_take_the_nearest(self):
        measured = {(1, 8192): "cta", (1, 131072): "cluster", (64, 131072): "stream",
                    (64, 32768): "cluster"}
        self.assertEqual(topk_choice.table(measured),
                         [(0, 0, "cta"), (0, 16384, "cluster"),
                          (8, 0, "cta"), (8, 16384, "cluster"), (8, 65536, "stream")])

    def test_equal_groups_are_one(self):
        measured = {(1, 8192): "cta", (64, 8192): "cta", (64, 32768): "cta"}
        self.assertEqual(topk_choice.table(measured), [(0, 0, "cta")])

    def test_the_header_is_written_and_names_its_source(self):
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "record.json"), pathlib.Path(folder, "table.h")
            source.write_text(json.dumps(record()))
            script = [sys.executable, ROOT / "bench/topk_choice.py", source]
            subprocess.run([*script, "-o", target], check=True)
            text = target.read_text()
            self.assertIn("a GPU, 2026-01-02", text)
            self.assertIn("    {8, 65536, Selector::stream},", text)
            source.write_text('{"context": {}, "benchmarks": []}')
            self.assertNotEqual(subprocess.run(script, capture_output=True).returncode, 0)

    def test_the_table_is_the_recorded_one(self):
        record_of_h200 = ROOT / "bench/results/h200/topk_gpu_bench.json"
        script = [sys.executable, ROOT / "bench/topk_choice.py", record_of_h200]
        written = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        self.assertEqual((ROOT / "topk/choice_table.h").read_text(), written)


if __name__ == "__main__":
    unittest.main()
