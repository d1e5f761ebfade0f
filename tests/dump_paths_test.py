#!/usr/bin/env python3
"""Recomputes a dump of every path from scratch: dump_paths_test.py PATH_OF_THE_COMMAND

The command runs the layer and writes what it read and computed; check_dump.py, which knows nothing
but numpy and the files, has to agree.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parent / "check_dump.py"
COMMAND = sys.argv.pop() if len(sys.argv) > 1 else "sparse-mla"
MIXED = "3q1s4100_q33s2081_q64s4160_q7"
SHORT = "3q1s2000_q33s2048_q7"


class DumpOfEveryPath(unittest.TestCase):
    def check(self, spec, path, *more):
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [COMMAND, "run", "--heads", "4", "--spec", spec, "--path", path, "--dump", folder]
                + list(more),
                capture_output=True,
                text=True,
            )
            self.assertEqual(run.returncode, 0, run.stderr)
            check = subprocess.run(
                [sys.executable, CHECK, folder], capture_output=True, text=True
            )
            self.assertEqual(check.returncode, 0, check.stdout + check.stderr)

    def test_masked(self):
        self.check(MIXED, "masked")

    def test_masked_in_many_chunks_with_masks_per_chunk(self):
        self.check(
            MIXED, "masked", "--workspace", "512", "--block", "61", "--mask-budget", "8000"
        )

    def test_sparse(self):
        self.check(MIXED, "sparse")

    def test_dense(self):
        self.check(SHORT, "dense")

    def test_auto_equal_split(self):
        self.check(MIXED, "auto", "--schedule", "equal-split")

    def test_quantised_caches(self):
        for cache in "fp8_ds_mla", "fp8":
            for spec, path in (MIXED, "masked"), (MIXED, "sparse"), (SHORT, "dense"):
                with self.subTest(cache=cache, path=path):
                    self.check(spec, path, "--cache", cache)

    def test_decodes_alone(self):
        self.check("4q1s3000", "auto")


if __name__ == "__main__":
    unittest.main()
