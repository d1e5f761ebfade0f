#!/usr/bin/env python3
"""Tests of the sparse-mla command from outside: command_test.py PATH_OF_THE_COMMAND"""

import csv
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLE = str(ROOT / "tools/traces/sample_chat.csv")
COMMAND = sys.argv.pop() if len(sys.argv) > 1 else "sparse-mla"


def run(*args):
    return subprocess.run([COMMAND, *args], capture_output=True, text=True)


def packed(context_lens, workspace, alignment):
    """Members (request, start, rows) of each chunk: the schedule, written down once more."""
    chunks, used, is_open = [], 0, False
    for request, context_len in enumerate(context_lens):
        if context_len == 0:
            is_open = False
        start = 0
        while start < context_len:
            if not is_open:
                chunks.append([])
                used, is_open = 0, True
            rows = context_len - start
            if rows > workspace - used:
                rows = (workspace - used) // alignment * alignment
                is_open = False
            if rows > 0:
                chunks[-1].append((request, start, rows))
            used += rows
            start += rows
    return chunks


def passes(context_lens, workspace, alignment):
    lens = [n for n in context_lens if n > 0]
    if not lens:
        return 0
    rows = max(workspace // len(lens) // alignment * alignment, alignment)
    return -(-max(lens) // rows)


def trace_totals(path, batch_tokens, workspace, alignment):
    totals, batch, room = [0, 0, 0], [], batch_tokens

    def close():
        totals[0] += 1
        totals[1] += len(packed(batch, workspace, alignment))
        totals[2] += passes(batch, workspace, alignment)
        batch.clear()

    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            done, query_len = 0, int(row["query_len"])
            while done < query_len:
                tokens = min(room, query_len - done)
                batch.append(int(row["context_len"]) + done)
                done += tokens
                room -= tokens
                if room == 0:
                    close()
                    room = batch_tokens
    if batch:
        close()
    return totals


class Command(unittest.TestCase):
    maxDiff = None

    def run_json(self, *args):
        result = run(*args, "--json")
        self.assertEqual(result.stderr, "")
        self.assertEqual(result.returncode, 0)
        return json.loads(result.stdout)

    def assert_refused(self, *args, says=""):
        result = run(*args)
        self.assertNotEqual(result.returncode, 0, args)
        self.assertGreater(result.returncode, 0, args)  # no signal
        self.assertEqual(result.stdout, "", args)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("sparse-mla: "), result.stderr)
        self.assertIn(says, result.stderr)


class General(Command):
    def test_help_and_version(self):
        for args in (["--help"], ["plan", "--help"], ["--version"]):
            result = run(*args)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            self.assertNotEqual(result.stdout, "")

    def test_bad_command_lines_get_one_line(self):
        self.assert_refused(says="expected info, plan, ")
        self.assert_refused("paln", says="paln")
        self.assert_refused("--frobnicate", says="--frobnicate")
        self.assert_refused("plan", "--spec", "q1", "--frobnicate", says="--frobnicate")
        self.assert_refused("plan", "--spec", "q1", "extra", says="extra")

    def test_info_lists_every_operation(self):
        info = self.run_json("info")
        names = [operation["operation"] for operation in info["operations"]]
        self.assertIn("select", names)
        for operation in info["operations"]:
            self.assertEqual(sum(entry["chosen"] for entry in operation["entries"]), 1)
            for entry in operation["entries"]:
                self.assertEqual(entry["usable"], entry["why_not"] == "")
        self.assertGreater(info["cpu"]["threads"], 0)
        self.assertIn("select", run("info").stdout)


    def test_full_disks_and_closed_pipes_are_errors(self):
        for args in (["--help"], ["info"], ["plan", "--spec", "q1s9"], ["plan", "--help"]):
            with open("/dev/full", "w") as full:
                result = subprocess.run([COMMAND, *args], stdout=full, stderr=subprocess.PIPE,
                                        text=True)
            self.assertEqual(result.returncode, 1, args)
            self.assertEqual(result.stderr, "sparse-mla: stdout: could not write all results\n")
            result = subprocess.run(["sh", "-c", 'exec "$0" "$@" >&-', COMMAND, *args],
                                    stderr=subprocess.PIPE, text=True)
            self.assertEqual(result.returncode, 1, args)
        self.assert_refused("plan", "--spec", "q1s9", "--svg", "/dev/full", says="--svg")
        small = ["--heads", "1", "--block", "1"]
        self.assert_refused("run", "--spec", "q1", *small, "--dump", "/dev/full", says="/dev/full")

    def test_devices_are_no_files(self):
        self.assert_refused("plan", "--trace", "/dev/zero", "--batch-tokens", "8",
                            says="without a line end")
        self.assert_refused("plan", "--trace", "/dev/null", "--batch-tokens", "8", says="header")
        self.assert_refused("run", "--spec", "q1", "--model", "/dev/zero", says="bytes, expected")
        self.assert_refused("run", "--spec", "q1", "--model", "/dev/null", says="not JSON")
        self.assert_refused("run", "--spec", "q1", "--model", str(ROOT), says="readable")

    def test_errors_are_one_line_whatever_the_arguments(self):
        for word in ("a\nb", "a\rb", "\x1b[31m", "é", "%s%n", ""):
            self.assert_refused("plan", "--spec", word)
            self.assert_refused("plan", "--trace", word, "--batch-tokens", "1")
            self.assert_refused("run", "--spec", "q1", "--model", word)
            self.assert_refused("topk", "--rows", "1", "--len", "1", "--algorithms", word)
            if word:
                self.assert_refused(word)
                self.assert_refused("--" + word)
        env = dict(os.environ, SPARSE_MLA_FORCE="select:\n")
        result = subprocess.run([COMMAND, "info"], env=env, capture_output=True, text=True)
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 1))

    def test_numbers_that_are_none(self):
        for word in ("nan", "inf", "-1", "0", "1e3", "0x", "99999999999999999999", " ", "1 2"):
            self.assert_refused("plan", "--spec", "q1", "--block", word, says="--block")
            self.assert_refused("run", "--spec", "q1", "--workspace", word, says="--workspace")
            self.assert_refused("topk", "--rows", word, "--len", "1", says="--rows")
            self.assert_refused("info", "--limits", "--max-tokens", word, says="--max-tokens")
        for word in ("nan", "inf", "-1", "99999999999999999999"):
            self.assert_refused("run", "--spec", "q1", "--mask-budget", word, says="budget")
            self.assert_refused("info", "--limits", "--score-budget", word, says="budget")
        for word in ("-1", "18446744073709551616", "nan", "1.5", " 1"):
            self.assert_refused("run", "--spec", "q1", "--seed", word, says="--seed")
            self.assert_refused("topk", "--rows", "1", "--len", "1", "--seed", word, says="--seed")
        self.assert_refused("run", "--trace", SAMPLE, "--batch-tokens", "8", "--max-batches",
                            "9223372036854775808", says="--max-batches")
        self.assert_refused("info", "--limits", "--score-budget", "3", says="score_budget_bytes")
        self.assert_refused("info", "--limits", "--score-budget", str(2**63 - 1), says="2^56")

    def test_what_memory_cannot_hold_is_refused(self):
        self.assert_refused("run", "--spec", "q1s2147483647", "--heads", "1", says="GiB")
        self.assert_refused("topk", "--rows", "4194304", "--len", "2048", "--k", "2048", says="GiB")
        self.assert_refused("run", "--spec", "q1s5", "--block", "2147483647", says="memory")

    def test_limits_say_where_bytes_go(self):
        info = self.run_json("info", "--limits", "--cache-tokens", "975424", "--layers", "61")
        cache = info["cache"]
        self.assertEqual(cache["latent_bytes_per_token_and_layer"], 1152)
        self.assertEqual(cache["index_bytes_per_token_and_layer"], 132)
        self.assertEqual(cache["latent_bytes"], 61 * 975424 * 1152)
        self.assertEqual(cache["index_bytes"], 61 * 975424 * 132)
        for name, size in (("fp8_ds_mla", 656), ("fp8", 576)):
            cache = self.run_json("info", "--limits", "--cache", name)["cache"]
            self.assertEqual(cache["latent_bytes_per_token_and_layer"], size)
        groups = {}
        for buffer in info["workspace_buffers"]:
            group = buffer["name"].split(".")[0]
            # Buffers of a group follow each other; groups share memory.
            self.assertGreaterEqual(buffer["offset"], groups.get(group, 0))
            groups[group] = buffer["offset"] + buffer["bytes"]
        self.assertEqual(set(groups), {"select", "sparse", "chunked"})
        self.assertLess(info["workspace_bytes"] - max(groups.values()), 256)
        self.assertGreaterEqual(info["workspace_bytes"], max(groups.values()))
        # A page of 11,000 rows does not multiply the workspace.
        for seqs in ("1", "32", "256"):
            rows = self.run_json("info", "--limits", "--block", "11000", "--max-seqs", seqs)
            self.assertEqual(rows["workspace_rows"], 65536)
        capped = self.run_json("info", "--limits", "--workspace", "4096")
        self.assertEqual(capped["workspace_rows"], 4096)
        self.assertLess(capped["workspace_bytes"], info["workspace_bytes"])
        people = run("info", "--limits", "--model", "glm-5", "--heads", "8").stdout
        self.assertIn("keys_and_values", people)
        self.assert_refused("info", "--heads", "8", says="--limits")
        huge = self.run_json("info", "--limits", "--max-tokens", "2147483647", "--max-seqs",
                             "2147483647", "--max-model-len", "2147483647", "--block", "1",
                             "--score-budget", str(2**56), "--mask-budget", str(2**56),
                             "--projection-budget", str(2**56))
        self.assertGreater(huge["workspace_bytes"], 2**56)
        self.assertTrue(all(b["bytes"] < 2**63 for b in huge["workspace_buffers"]))


class Plan(Command):
    def test_the_worst_case_of_the_equal_split(self):
        plan = self.run_json("plan", "--spec", "q513s60513_31q513s529", "--block", "16")
        self.assertEqual(plan["batches"], 1)
        self.assertEqual(plan["packed_chunks"], 1)
        self.assertEqual(plan["equal_split_passes"], 30)
        (chunk,) = plan["chunks"]
        self.assertEqual((chunk["request_begin"], chunk["request_end"]), (0, 32))
        self.assertEqual(chunk["seq_lens"], [60000] + 31 * [16])
        self.assertEqual(chunk["cu_query_lens"], [513 * i for i in range(33)])

    def test_nothing_aligned_fits_behind_900_rows(self):
        plan = self.run_json(
            "plan", "--spec", "q4s904_q4s516", "--block", "256", "--workspace", "1024"
        )
        self.assertEqual([chunk["seq_lens"] for chunk in plan["chunks"]], [[900], [512]])

    def test_context_may_pass_int32_in_all(self):
        plan = self.run_json("plan", "--spec", "3q1s1000000000", "--workspace", "1048576")
        self.assertEqual(plan["context_rows"], 3 * 999999999)
        self.assertEqual(plan["packed_chunks"], -(-3 * 999999999 // 1048576))

    def test_chunks_of_random_specs(self):
        rng = random.Random(5)
        for _ in range(40):
            alignment = rng.choice([1, 16, 61, 64])
            workspace = rng.choice([alignment, 100 + alignment, 1024, 65536])
            items, context_lens, query_lens = [], [], []
            for _ in range(rng.randint(1, 30)):
                query_len = rng.choice([0, 1, 1, 7, 512])
                context_len = rng.choice([0, 1, 16, 900, 1024, 3000, rng.randrange(20000)])
                items.append(f"q{query_len}s{query_len + context_len}")
                query_lens.append(query_len)
                context_lens.append(context_len)
            plan = self.run_json("plan", "--spec", "_".join(items), "--workspace", str(workspace),
                                 "--alignment", str(alignment))
            chunks = packed(context_lens, workspace, alignment)
            self.assertEqual(plan["packed_chunks"], len(chunks))
            self.assertEqual(plan["equal_split_passes"], passes(context_lens, workspace, alignment))
            self.assertEqual(len(plan["chunks"]), len(chunks))
            for got, members in zip(plan["chunks"], chunks):
                requests = list(range(got["request_begin"], got["request_end"]))
                self.assertEqual(list(zip(requests, got["starts"], got["seq_lens"])), members)
                rows = [n for _, _, n in members]
                self.assertLessEqual(sum(rows), workspace)
                self.assertEqual(got["num_rows"], sum(rows))
                self.assertEqual(got["cu_seq_lens"], [sum(rows[:i]) for i in range(len(rows) + 1)])
                queries = query_lens[requests[0] : requests[-1] + 1]
                self.assertEqual(
                    got["cu_query_lens"], [sum(queries[:i]) for i in range(len(queries) + 1)]
                )
                self.assertEqual(got["token_begin"], sum(query_lens[: requests[0]]))
                self.assertEqual(got["token_end"], got["token_begin"] + sum(queries))
                self.assertEqual(got["max_query_len"], max(queries))
                self.assertEqual(got["max_seq_len"], max(rows))
                self.assertEqual(got["is_continuation"], members[0][1] > 0)
                self.assertEqual(
                    got["continuation_token_end"],
                    got["token_begin"] + (queries[0] if members[0][1] > 0 else 0),
                )

    def test_shards_of_the_context(self):
        args = ["plan", "--spec", "q4s3004_2q4s204", "--block", "128", "--workspace", "1024"]
        args += ["--dcp", "2", "--interleave", "64"]
        plan = self.run_json(*args)
        self.assertEqual((plan["dcp"], plan["interleave"], plan["alignment"]), (2, 64, 128))
        self.assertEqual(plan["local_totals"], [1536, 128, 128])
        for chunk in plan["chunks"]:
            self.assertLessEqual(chunk["cu_local_seq_lens"][-1], 512)
        self.assertEqual([chunk["local_starts"] for chunk in plan["chunks"]],
                         [[0], [512], [1024], [0, 0]])
        self.assertEqual([chunk["local_seq_lens"] for chunk in plan["chunks"]],
                         [[512], [512], [512], [128, 128]])
        self.assertEqual(plan["chunks"][3]["rank_seq_lens"], [[128, 72], [128, 72]])
        result = run(*args)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("rows a rank", result.stdout)
        self.assertIn("(a rank's 1,024)", result.stdout)
        self.assertIn("dcp 2, interleave 64: at most 512 rows a rank", result.stdout)

    def test_shards_of_random_specs(self):
        rng = random.Random(6)
        for _ in range(30):
            world, interleave = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 16, 64])
            block = rng.choice([1, 16, 61, 64])
            stripe = interleave * world if world > 1 else 1
            alignment = math.lcm(block, stripe)
            workspace = alignment + rng.choice([0, 100, 5000])
            context_lens = [rng.choice([0, 1, 64, 700, rng.randrange(9000)]) for _ in range(12)]
            plan = self.run_json(
                "plan", "--spec", "_".join(f"q2s{2 + n}" for n in context_lens), "--block",
                str(block), "--workspace", str(workspace), "--dcp", str(world), "--interleave",
                str(interleave))
            self.assertEqual(plan["alignment"], alignment)
            padded = [-(-n // stripe) * (stripe // world) for n in context_lens]
            self.assertEqual(plan["local_totals"], padded)
            # A sharded context is packed like one of its padded lengths.
            chunks = packed(padded, workspace // world, alignment // world)
            self.assertEqual(len(plan["chunks"]), len(chunks))
            for got, members in zip(plan["chunks"], chunks):
                requests = range(got["request_begin"], got["request_end"])
                local = list(zip(requests, got["local_starts"], got["local_seq_lens"]))
                self.assertEqual(local, members)
                sums = [sum(got["local_seq_lens"][:i]) for i in range(len(members) + 1)]
                self.assertEqual(got["cu_local_seq_lens"], sums)
                for start, rows, held in zip(got["starts"], got["seq_lens"], got["rank_seq_lens"]):
                    ranks = [p // interleave % world for p in range(start, start + rows)]
                    self.assertEqual(held, [ranks.count(rank) for rank in range(world)])

    def test_shards_of_a_trace(self):
        plan = self.run_json("plan", "--trace", SAMPLE, "--batch-tokens", "8192", "--workspace",
                             "8192", "--dcp", "4", "--interleave", "16")
        self.assertEqual((plan["dcp"], plan["interleave"], plan["batches"]), (4, 16, 499))
        self.assertGreaterEqual(plan["packed_chunks"], 1704)  # the padding takes room
        self.assertNotIn("local_totals", plan)
        plan = self.run_json("plan", "--spec", "q4s3004")
        self.assertNotIn("dcp", plan)
        self.assertNotIn("local_starts", plan["chunks"][0])

    def check_trace(self, path, batch_tokens, workspace, expected):
        plan = self.run_json("plan", "--trace", path, "--batch-tokens", str(batch_tokens),
                             "--workspace", str(workspace), "--alignment", "64")
        got = [plan["batches"], plan["packed_chunks"], plan["equal_split_passes"]]
        self.assertEqual(got, expected)
        self.assertNotIn("chunks", plan)

    def test_totals_of_traces(self):
        self.check_trace(SAMPLE, 8192, 8192, [499, 1704, 2759])
        self.check_trace(SAMPLE, 8192, 65536, [499, 549, 635])
        self.check_trace(SAMPLE, 32768, 8192, [125, 662, 2066])
        self.check_trace(SAMPLE, 32768, 65536, [125, 186, 318])
        for batch_tokens, workspace in ((1000, 4096), (1 << 30, 64)):
            expected = trace_totals(SAMPLE, batch_tokens, workspace, 64)
            self.check_trace(SAMPLE, batch_tokens, workspace, expected)

        path = os.environ.get("SPARSE_MLA_TRACE")  # a published trace, which is not kept here
        if path is None:
            return
        self.check_trace(path, 8192, 8192, [11072, 36340, 62368])
        self.check_trace(path, 8192, 65536, [11072, 11853, 14466])
        self.check_trace(path, 32768, 8192, [2768, 13976, 49051])
        self.check_trace(path, 32768, 65536, [2768, 3291, 7342])

    def test_tables_for_people(self):
        result = run("plan", "--spec", "q513s60513_31q513s529", "--block", "16")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("packed: 1 chunk   equal split: 30 passes", result.stdout)
        self.assertIn("60,496", result.stdout)

    def test_drawings_are_xml(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.svg")
            for args in (
                ["--spec", "q513s60513_31q513s529", "--block", "16"],
                ["--spec", "8q512s9000_q64s40000_16q1s2000", "--workspace", "4096"],
                ["--spec", "q5"],
                ["--trace", SAMPLE, "--batch-tokens", "8192"],
            ):
                result = run("plan", *args, "--svg", path)
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                root = xml.etree.ElementTree.parse(path).getroot()
                self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
                os.remove(path)
            self.assert_refused("plan", "--spec", "q5", "--svg", os.path.join(folder, "no/x.svg"),
                                says="--svg")
            self.assert_refused("plan", "--spec", "q5", "--svg", "", says="--svg")

    def test_the_picture_of_the_documentation_is_current(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "plan.svg")
            run("plan", "--spec", "q513s60513_31q513s529", "--block", "16", "--svg", str(path))
            self.assertEqual(path.read_text(), (ROOT / "docs/plan.svg").read_text())

    def test_bad_input_gets_one_line(self):
        self.assert_refused("plan", says="neither --spec nor --trace")
        self.assert_refused("plan", "--spec", "q1", "--trace", SAMPLE, says="both")
        self.assert_refused("plan", "--trace", SAMPLE, says="--batch-tokens")
        self.assert_refused("plan", "--spec", "q1", "--batch-tokens", "5", says="--batch-tokens")
        self.assert_refused("plan", "--trace", SAMPLE, "--batch-tokens", "0", says="--batch-tokens")
        self.assert_refused("plan", "--trace", "no such file", "--batch-tokens", "8",
                            says="No such file")
        self.assert_refused("plan", "--trace", str(ROOT), "--batch-tokens", "8", says="folder")
        self.assert_refused("plan", "--trace", str(ROOT / "LICENSE"), "--batch-tokens", "8",
                            says="header")
        self.assert_refused("plan", "--spec", "", says="spec: got an empty text")
        self.assert_refused("plan", "--spec", "q1x", says="character 3")
        self.assert_refused("plan", "--spec", "q1\nq2", says="character 3")
        for workspace in ("0", "-1", "x", "1.5", "99999999999"):
            self.assert_refused("plan", "--spec", "q1", "--workspace", workspace,
                                says="--workspace")
        self.assert_refused("plan", "--spec", "q1s9", "--workspace", "10", says="alignment: got 64")
        for args, says in (
            (["--dcp", "0"], "--dcp"),
            (["--dcp", "257"], "--dcp"),
            (["--dcp", "x"], "--dcp"),
            (["--interleave", "2"], "--dcp"),
            (["--dcp", "2", "--interleave", "0"], "--interleave"),
            (["--dcp", "2", "--interleave", "64", "--alignment", "96"],
             "alignment: got 96, expected a multiple of interleave · world (128)"),
            (["--dcp", "2", "--interleave", "48", "--workspace", "100"], "= 192, expected at most"),
            (["--dcp", "4", "--interleave", "1073741824"], "interleave: got 1073741824"),
            (["--dcp", "4", "--interleave", "1073741824", "--alignment", "64"],
             "interleave: got 1073741824"),
        ):
            self.assert_refused("plan", "--spec", "q1s9", *args, says=says)
        self.assert_refused("plan", "--spec", "q2147483647_q1", says="2147483648 new tokens")
        self.assert_refused("plan", "--spec", "q1s2147483647", "--workspace", "1", "--block", "1",
                            says="chunks")
        self.assert_refused("plan", "--spec", "1048576q1s2097151k", says="chunks")


class Run(Command):
    def test_check_of_every_cache(self):
        bounds = {"bf16": None, "fp8_ds_mla": 5e-2, "fp8": 7e-2}
        for cache, bound in bounds.items():
            with self.subTest(cache=cache):
                args = ("run", "--spec", "2q1s300_q33s400_q7", "--heads", "2", "--check",
                        "--cache", cache)
                out = self.run_json(*args)
                self.assertTrue(out["passed"])
                self.assertEqual(out["cache"], cache)
                self.assertLessEqual(out["rel_error"], 5e-3)
                self.assertLessEqual(out["max_rel_error"], 1e-2)
                self.assertEqual("rel_error_unquantised" in out, bound is not None)
                self.assertEqual("rel_error_unquantised" in run(*args).stdout, bound is not None)
                if bound:
                    self.assertLessEqual(out["rel_error_unquantised"], bound)
                    self.assertGreater(out["rel_error_unquantised"], bound / 4)
        self.assert_refused("run", "--spec", "q1", "--cache", "fp4", says="--cache")

    def test_paths_are_compared_on_the_same_batches(self):
        args = ("run", "--trace", SAMPLE, "--batch-tokens", "64", "--max-batches", "3", "--heads",
                "1", "--topk", "96", "--compare-paths")
        out = self.run_json(*args)
        self.assertEqual(sum(of_path["batches"] for of_path in out["paths"].values()),
                         sum(batch["path"] != "none" for batch in out["batches"]))
        for path, of_path in out["paths"].items():
            self.assertAlmostEqual(of_path["ms"], sum(batch["ms"] for batch in out["batches"]
                                                      if batch["path"] == path))
            self.assertGreaterEqual(set(of_path["ms_of_path"]), {"masked", "sparse"})
        text = run(*args).stdout
        self.assertIn("of the best path", text)
        self.assertNotIn("ms_of_path", run(*args[:-1], "--json").stdout)
        # Dense is a path of short sequences alone.
        short = self.run_json("run", "--spec", "q8", "--heads", "1", "--compare-paths")
        self.assertEqual(set(short["paths"]["dense"]["ms_of_path"]), {"dense", "masked", "sparse"})

    def test_bad_input_gets_one_line(self):
        self.assert_refused("run", says="neither --spec nor --trace")
        self.assert_refused("run", "--spec", "q1x", says="character 3")
        self.assert_refused("run", "--spec", "q1", "--max-batches", "1", says="--max-batches")
        self.assert_refused("run", "--spec", "q1", "--heads", "0", says="--heads")
        self.assert_refused("run", "--spec", "q1", "--model", "no-such", says="deepseek-v3.2, glm-5")
        self.assert_refused("run", "--spec", "q1", "--model", str(ROOT / "LICENSE"), says="not JSON")
        self.assert_refused("run", "--spec", "q1", "--path", "x", says="--path")
        self.assert_refused("run", "--spec", "q1", "--check=x", says="--check")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"index_topkk": 2048, "num_attention_heads": "128"}')
            file.flush()
            self.assert_refused("run", "--spec", "q1", "--model", file.name,
                                says="did you mean index_topk?")


    def run_checked(self, *args):
        out = self.run_json("run", "--check", *args)
        self.assertTrue(out["passed"], args)
        self.assertLessEqual(out["rel_error"], 5e-3)
        self.assertLessEqual(out["max_rel_error"], 1e-2)
        return out

    def test_glm_5_on_every_path(self):
        # Heads of 192 + 64 and 256; one request longer than topk, where the path allows it.
        for path, spec in (("dense", "q40s1000_q1s2500"), ("masked", "q20s2100_q1s2500"),
                           ("sparse", "q20s2100_q1s2500")):
            out = self.run_checked("--model", "glm-5", "--heads", "16", "--spec", spec,
                                   "--path", path, "--workspace", "1500")
            self.assertEqual((out["path"], out["heads"], out["topk"]), (path, 16, 2048))
            self.assertTrue(out["selection_exact"])

    def test_topk_of_the_checkpoint_and_of_the_user(self):
        # The checkpoint's value wins over any default, the user's over the checkpoint's.
        config = json.loads((ROOT / "tests/data/topk_512_config.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            for topk in (512, 1024):
                path = pathlib.Path(folder, f"{topk}.json")
                path.write_text(json.dumps(config | {"index_topk": topk}))
                args = ["--model", str(path), "--heads", "4", "--spec", "q5s1200_q1s1500"]
                self.assertEqual(self.run_checked(*args)["topk"], topk)
                for attention in ("masked", "sparse"):
                    out = self.run_checked(*args, "--topk", "256", "--path", attention)
                    self.assertEqual((out["topk"], out["path"]), (256, attention))
        self.assert_refused("run", "--spec", "q1", "--topk", "0", says="--topk")


class Topk(Command):
    def test_every_algorithm_is_exact_and_deterministic(self):
        for data in ("normal", "narrow", "ties", "relu"):
            for rows, length, k in ((7, 3000, 512), (3, 100, 2048)):
                out = self.run_json("topk", "--rows", str(rows), "--len", str(length), "--k",
                                    str(k), "--data", data)
                usable = [line for line in out["algorithms"] if line["usable"]]
                self.assertGreater(len(usable), 0)
                for line in usable:
                    self.assertTrue(line["exact"], (data, line))
                    self.assertTrue(line["deterministic"], (data, line))
                    self.assertGreater(line["gb_per_s"], 0)

    def test_algorithms_are_chosen_by_name(self):
        every = self.run_json("topk", "--rows", "1", "--len", "10")["algorithms"]
        one = self.run_json("topk", "--rows", "1", "--len", "10", "--algorithms", every[0]["name"])
        self.assertEqual([line["name"] for line in one["algorithms"]], [every[0]["name"]])
        self.assertIn(every[0]["name"], run("topk", "--rows", "1", "--len", "10").stdout)

    def test_one_backend(self):
        args = ("topk", "--rows", "2", "--len", "500", "--k", "20")
        cpu = self.run_json(*args, "--backend", "cpu")["algorithms"]
        self.assertEqual({line["backend"] for line in cpu}, {"cpu"})
        self.assertEqual(sum(line["chosen"] for line in cpu), 1)
        every = self.run_json(*args)["algorithms"]
        cuda = [line["name"] for line in every if line["backend"] == "cuda"]
        if cuda:
            out = self.run_json(*args, "--backend", "cuda")["algorithms"]
            self.assertEqual([line["name"] for line in out], cuda)
        else:
            self.assert_refused(*args, "--backend", "cuda", says="--backend: got cuda")

    def test_hints_change_no_result(self):
        for hint in ("0", "70", "100"):
            out = self.run_json("topk", "--rows", "3", "--len", "3000", "--k", "512", "--hint", hint)
            for line in out["algorithms"]:
                self.assertTrue(not line["usable"] or line["exact"], line)
        self.assert_refused("topk", "--rows", "1", "--len", "10", "--hint", "101", says="--hint")

    def test_bad_input_gets_one_line(self):
        self.assert_refused("topk", "--len", "10", says="--rows")
        self.assert_refused("topk", "--rows", "0", "--len", "10", says="--rows")
        self.assert_refused("topk", "--rows", "1", "--len", "10", "--k", "0", says="--k")
        self.assert_refused("topk", "--rows", "1", "--len", "10", "--data", "x", says="--data")
        self.assert_refused("topk", "--rows", "1", "--len", "10", "--algorithms", "x,y",
                            says='--algorithms: got "x", expected all')
        self.assert_refused("topk", "--rows", "8589934592", "--len", "2147483647", says="--rows")


if __name__ == "__main__":
    unittest.main()
