#!/usr/bin/env python3
"""README is true: readme_test.py PATH_OF_THE_COMMAND

Its C++ is examples/quickstart.cpp to the letter, its commands run, its tables are what the command
prints, and the files that it names exist.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMAND = sys.argv.pop() if len(sys.argv) > 1 else "sparse-mla"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(*args):
    return subprocess.run([COMMAND, *args], capture_output=True, text=True, cwd=ROOT)


class Readme(unittest.TestCase):
    def test_the_example_is_the_one_that_is_compiled(self):
        self.assertEqual(blocks("cpp"), [(ROOT / "examples/quickstart.cpp").read_text()])

    def test_its_commands_run(self):
        lines = [line for block in blocks("sh") for line in block.splitlines()]
        commands = [shlex.split(line, comments=True) for line in lines]
        self.assertGreaterEqual(len(commands), 7)
        usage = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True).stdout
        for command in commands:
            with self.subTest(command=command):
                if command[0] == "./dev":
                    self.assertRegex(usage, rf"(?m)^  {command[1]}\b")
                    continue
                self.assertEqual(command[0], "sparse-mla")
                result = run(*command[1:])
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertTrue(result.stdout)

    def test_the_trace_table(self):
        rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", README, re.M)
        self.assertEqual(len(rows), 4)
        for row in rows:
            tokens, workspace, batches, passes, chunks = (int(c.replace(",", "")) for c in row)
            result = run(
                "plan", "--trace", "tools/traces/sample_chat.csv", "--batch-tokens", str(tokens),
                "--workspace", str(workspace), "--alignment", "64", "--json",
            )  # fmt: skip
            plan = json.loads(result.stdout)
            self.assertEqual(
                (plan["batches"], plan["equal_split_passes"], plan["packed_chunks"]),
                (batches, passes, chunks),
            )

    def test_the_figures_are_the_recorded_ones(self):
        results = json.loads((ROOT / "bench/results/amd-epyc/cpu_figures.json").read_text())
        got = {run["name"].removesuffix("/iterations:1"): run["figure"] for run in results["benchmarks"]}
        section = README.split("## How fast on a CPU")[1].split("## ")[0]
        cells = re.findall(r"\| ([\d.]+(?:×| µs)?(?: / [\d.]+×)?) \|$", section, re.M)
        topk = "topk_speedup_over_nth_element/"
        expected = [
            f"{got['plan_metadata_us_per_1024/1024']:.1f} µs",
            f"{got[topk + 'normal']:.1f}× / {got[topk + 'ties']:.1f}×",
            f"{got['topk_speedup_over_full_sort/normal']:.0f}×",
            f"{got['masked_mha_part_of_sgemm/full_mask/0']:.2f}",
            f"{got['masked_mha_time_ratio/half_of_the_tiles_empty/1']:.2f}",
            f"{got['sparse_mqa_time_ratio/2048_of_32768_keys']:.3f}",
            f"{got['indexer_scores_part_of_sgemm']:.2f}",
        ]
        self.assertEqual(cells, expected)

    def test_the_gpu_figures_are_the_recorded_ones(self):
        runs = {}
        for record in (ROOT / "bench/results/h200").glob("*.json"):
            for run in json.loads(record.read_text())["benchmarks"]:
                runs[re.sub(r"/(iterations:\d+|manual_time)", "", run["name"])] = run
        ms = lambda name: runs[name]["median_us"] / 1e3
        part = lambda name: f"{runs[name]['% of copy']:.0f} %"
        ratio = lambda a, b: f"{ms(a):.2f} ms / {ms(b):.2f} ms, {ms(b) / ms(a):.1f}×"
        topk = lambda name: f"{runs['topk/auto/' + name]['median_us']:.1f} µs"
        rows = "4096x131072/k2048/normal"
        worst, mqa = "worst_case/", "sparse_mqa/sm90_wgmma/prefill/"
        decode = "sparse_mqa/sm90_decode/decode/fp8_ds_mla/128_heads/"
        expected = [
            ratio(worst + "masked/packed", worst + "masked/equal_split"),
            ratio(worst + "dense/packed", worst + "dense/equal_split"),
            ratio(worst + "dense/packed", worst + "dense/equal_split_fused"),
            f"{runs['attend/full_mask/4096x4096x128']['TFLOP/s']:.0f}",
            f"{ms('attend/full_mask/513x60000x16'):.2f} ms",
            part("merge/tokens:8192/heads:128/fp32"),
            part("gather/rows:131072/bf16"),
            part("build_masks/rows:16384/keys:32768/ascending"),
            *(
                f"{ms(mqa + cache + '128_heads/4096x32768/random'):.1f} ms / "
                f"{ms(mqa + cache + '16_heads/4096x32768/random'):.1f} ms"
                for cache in ("", "fp8_ds_mla/")
            ),
            " / ".join(f"{runs[decode + b]['median_us']:.0f} µs" for b in ("1x1", "32x1", "128x1")),
            f"{runs['indexer_scores/ragged/4096x32768']['TFLOP/s']:.0f}",
            " / ".join(topk(shape) for shape in ("1x8192/k2048/normal", "1x131072/k2048/normal")),
            " / ".join(topk(f"64x131072/k2048/{data}") for data in ("normal", "narrow", "ties")),
            f"{runs['topk/auto/' + rows]['median_us']:.0f} µs, "
            f"{runs['topk/auto/' + rows]['GB/s']:.0f} GB/s",
        ]
        section = README.split("## How fast on an H200")[1].split("## ")[0]
        self.assertEqual(re.findall(r"^\| .* \| ([\d.].*) \|$", section, re.M), expected)

    def test_the_worst_case(self):
        plan = json.loads(
            run("plan", "--spec", "q513s60513_31q513s529", "--block", "16", "--json").stdout
        )
        self.assertEqual((plan["packed_chunks"], plan["equal_split_passes"]), (1, 30))
        self.assertIn("take 30 passes", " ".join(README.split()))

    def test_the_files_that_documents_name_exist(self):
        for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"),
                         *ROOT.glob("*/README.md")]:
            text = document.read_text()
            names = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:md|h|cpp|py|csv|svg|txt|cuh|cu|json))`", text)
            names += re.findall(r"\]\(((?!http)[^)#]+)\)", text)
            for name in names:
                with self.subTest(document=document.name, name=name):
                    self.assertTrue(
                        (ROOT / name).exists() or (document.parent / name).exists(), name
                    )


if __name__ == "__main__":
    unittest.main()
