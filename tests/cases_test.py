#!/usr/bin/env python3
"""docs/cases.md is whole and true: every id has its row, every row an owner, and every test that
it names is in the sources.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
IDS = """
R01 R02 R03 R05 R06 R08 R09 R10 R11 R12 R13 R15 R16 R20 R21 R23 R25 R26 R27 R28 R30
R31 R32 R35 R36 R37 R38 R39 R42 R43 R44
R45 R46 R47 R48 R49 R50 R52 R53 R55 R57 R58 R60
R61 R62 R64 R66 R67 R68 R71 R73 R74 R75 R78 R80
R82 R83 R84 R88 R90 R91 R92 R93 R96 R99
""".split()


def rows():
    for line in (ROOT / "docs/cases.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"R\d\d", cells[0]):
            yield cells


def defines(file, name):
    """Whether a test or a case of this name is written down in the file."""
    text = file.read_text()
    suite, _, test = name.rpartition(".")
    if not suite:
        return f'"{name}"' in text
    if file.suffix == ".py":
        return re.search(rf"^class {suite}\b.*?^    def {test}\(", text, re.M | re.S) is not None
    return re.search(rf"\bTEST(_F|_P)?\(\s*{suite},\s*{test}\s*\)", text) is not None


class Cases(unittest.TestCase):
    def test_every_id_has_one_row(self):
        self.assertEqual(sorted(cells[0] for cells in rows()), sorted(IDS))

    def test_every_row_is_complete(self):
        for cells in rows():
            with self.subTest(id=cells[0]):
                self.assertEqual(len(cells), 4)
                self.assertTrue(all(cells))
                # A test, what owns it, or why it is none of ours.
                self.assertRegex(cells[3], r"`tests/|to come|does not apply")

    def test_every_test_exists(self):
        for cells in rows():
            for span in re.findall(r"`(tests/[^`]*|bench/[^`]*)`", cells[3]):
                with self.subTest(id=cells[0], span=span):
                    path, _, name = span.partition(": ")
                    file = ROOT / path
                    self.assertTrue(file.is_file(), "no such file")
                    if name:
                        self.assertTrue(defines(file, name), "no such test")


if __name__ == "__main__":
    unittest.main()
