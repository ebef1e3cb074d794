#!/usr/bin/env python3
"""The faults of tools/mutants fit the tree, and the tool tells the outcomes apart."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True


def load(name):
    """A script of tools/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "tools" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


mutants = load("mutants")
MUTANTS = mutants.mutant_table.MUTANTS


def problems(mutant, root):
    """What keeps `mutant` from being planted in the tree `root` and caught."""
    found = [mutants.stale(mutant, root)]
    if not mutant.file.endswith(".cc"):
        found.append(f"{mutant.name}: {mutant.file} is no .cc file: much is compiled again")
    if mutant.old == mutant.new:
        found.append(f"{mutant.name} changes nothing")
    package = mutant.target[2:].partition(":")[0]
    source = root / package / mutant.source
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    name, _, parameter = mutant.test.partition("/")
    suite, _, case = name.partition(".")
    if not re.search(rf"\bTEST(_F|_P)?\({suite},\s*{case}\)", text):
        found.append(f"{mutant.name}: there is no test {name} in {package}/{mutant.source}")
    if parameter and f'"{parameter}"' not in text:
        found.append(f"{mutant.name}: {package}/{mutant.source} names no '{parameter}'")
    build = root / package / "BUILD"
    rule = re.search(rf'name = "{mutant.target.partition(":")[2]}",.*?\n\)',
                     build.read_text(encoding="utf-8") if build.is_file() else "", re.DOTALL)
    if rule is None or f'"{mutant.source}"' not in rule.group():
        found.append(f"{mutant.name}: {mutant.target} has no source {mutant.source}")
    return [problem for problem in found if problem]


class TableTest(unittest.TestCase):
    def test_fits_the_tree(self):
        found = [problem for mutant in MUTANTS for problem in problems(mutant, ROOT)]
        self.assertFalse(found, "\n" + "\n".join(found))

    def test_is_large_and_wide(self):
        self.assertGreaterEqual(len(MUTANTS), 25)
        self.assertEqual(len(MUTANTS), len({mutant.name for mutant in MUTANTS}))
        self.assertEqual({"collectives", "composable", "hooks", "state"},
                         {mutant.file.split("/")[0] for mutant in MUTANTS})
        targets = [mutant.target for mutant in MUTANTS]
        changes = sum(a != b for a, b in zip(targets, targets[1:]))
        self.assertEqual(changes + 1, len(set(targets)), "keep those of one test together")


class ProblemsTest(unittest.TestCase):
    GOOD = mutants.mutant_table.Mutant(
        "m", "a.cc", "x + 1", "x", "//t:a_test", "a_test.cc", "A.B", "why")
    FILES = {"a.cc": "int f(int x) { return x + 1; }\n",
             "t/BUILD": 'cc_test(\n    name = "a_test",\n    srcs = ["a_test.cc"],\n)\n'
                        'cc_test(\n    name = "c_test",\n    srcs = ["c_test.cc"],\n)\n',
             "t/a_test.cc": 'TEST_P(A,\n     B) {}\nNamed("One");\n'}

    def problems(self, **changed):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in self.FILES.items():
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return problems(self.GOOD._replace(**changed), root)

    def test_none(self):
        self.assertEqual([], self.problems())
        self.assertEqual([], self.problems(test="A.B/One"))

    def test_stale(self):
        self.assertEqual(["stale mutant m: expected its old text once in a.cc, found it 0 times"],
                         self.problems(old="x + 2"))
        self.assertEqual(["stale mutant m: expected its old text once in a.cc, found it 2 times"],
                         self.problems(old="int"))

    def test_no_such_test(self):
        self.assertEqual(["m: there is no test A.C in t/a_test.cc"], self.problems(test="A.C"))
        self.assertEqual(["m: t/a_test.cc names no 'Two'"], self.problems(test="A.B/Two"))
        self.assertEqual(["m: //t:c_test has no source a_test.cc"],
                         self.problems(target="//t:c_test"))

    def test_no_fault(self):
        self.assertEqual(["m changes nothing"], self.problems(new="x + 1"))
        self.assertIn("m: t/BUILD is no .cc file: much is compiled again",
                      self.problems(file="t/BUILD", old="c_test.cc"))


class ToolTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def result(self, script, limit=60):
        binary = self.folder / "binary"
        binary.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        binary.chmod(0o755)
        return mutants.run_binary(binary, ["A.B"], self.folder, limit)

    def test_outcomes(self):
        self.assertEqual(("green", "--gtest_filter=A.B:*/A.B:A.B/*:*/A.B/*\n"),
                         self.result("echo $1"))
        self.assertEqual("failed", self.result("exit 1")[0])
        self.assertEqual("crashed", self.result("kill -SEGV $$")[0])
        self.assertEqual(("hung", "begun\n"), self.result("echo begun; sleep 60", limit=0.5))

    def test_a_test_has_passed_only_if_it_ran(self):
        output = ("[ RUN      ] All/A.B/0\n[       OK ] All/A.B/0 (1 ms)\n"
                  "[       OK ] C.D (0 ms)\n[  FAILED  ] E.F (0 ms)\n")
        self.assertEqual([True, True, True, False, False, False],
                         [mutants.passes(test, output)
                          for test in ("A.B", "A.B/0", "C.D", "A.B/1", "E.F", "A")])

    def test_copy_is_exact(self):
        source, copy = self.folder / "source", self.folder / "copy"
        for name, text in {"a": "1", "b/c": "2", "not_listed": "3"}.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text, encoding="utf-8")
        (source / "a").chmod(0o755)
        mutants.copy_tree(["a", "b/c"], source, copy)
        unchanged = (copy / "a").stat().st_mtime_ns
        (copy / "b/c").write_text("a fault", encoding="utf-8")
        (copy / "b/old").write_text("gone", encoding="utf-8")
        (copy / "user.bazelrc").write_text("kept", encoding="utf-8")
        mutants.copy_tree(["a", "b/c"], source, copy)
        self.assertEqual(["a", "b/c", "user.bazelrc"],
                         sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()))
        self.assertEqual("2", (copy / "b/c").read_text(encoding="utf-8"))
        self.assertTrue(os.access(copy / "a", os.X_OK))
        self.assertEqual(unchanged, (copy / "a").stat().st_mtime_ns)

    def test_outcome_of_a_fault(self):
        place = mutants.Workplace(self.folder, limit=60)
        (place.tree / "a.cc").write_text("x + 1", encoding="utf-8")
        seen = []

        def build(_targets):
            seen.append((place.tree / "a.cc").read_text(encoding="utf-8"))
            return trouble

        place.build = build
        for trouble, result, line, caught in [
                ("", "failed", r"caught    m  \(by A\.B, 0 s\)", True),
                ("", "hung", r"caught    m  \(by A\.B, which hung, 0 s\)", True),
                ("", "green", r"SURVIVED  m  \(A\.B passed, 0 s\)", False),
                ("a.cc:1: error\n", "", r"a\.cc:1: error\nBROKEN    m  \(does .*\)", False)]:
            place.run = lambda _target, _tests, result=result: (result, "")
            got = place.plant(ProblemsTest.GOOD)
            self.assertRegex(got[0], rf"^{line}$")
            self.assertEqual(caught, got[1])
            self.assertEqual("x", seen[-1])
            self.assertEqual("x + 1", (place.tree / "a.cc").read_text(encoding="utf-8"))

    def test_list(self):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.assertEqual(0, mutants.main(["--list", "divide-skipped"]))
        self.assertRegex(output.getvalue(), r"^divide-skipped +state/reduction_chain\.cc +"
                                            r"//tests/state:state_test  GradientReductionTest")

    def test_unknown_name(self):
        with self.assertRaisesRegex(SystemExit, "unknown mutant 'x' .--list shows all"):
            mutants.main(["x"])


if __name__ == "__main__":
    unittest.main()
