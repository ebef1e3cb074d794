#!/usr/bin/env python3
"""tools/presubmit, tools/compile_commands and .clang-tidy on small good and bad inputs."""

import importlib.machinery
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True


def load(name):
    """A script of tools/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "tools" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


presubmit = load("presubmit")
compile_commands = load("compile_commands")
compilation = presubmit.compilation

FILES = {
    "state/a.h": '#include "state/b.h"\n#include <vector>\n#include "absl/gone.h"\n',
    "state/b.h": "int b();\n",
    "state/a.cc": '#include "state/a.h"\n',
    "hooks/c.h": '#include "state/a.h"\n',
    "tests/t.cc": '#include "hooks/c.h"\n',
    "tests/z.cc": '#include "state/b.h"\n#include "state/a.h"\n',
}


def command(source, *flags):
    compiler = shutil.which("g++") or "g++"
    return {"file": source, "arguments": [compiler, "-iquote", ".", *flags, "-c", source]}


class TreeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def tree(self, *sources):
        return compilation.Tree(self.root, [command(s) for s in sources])

    def test_closure(self):
        tree = self.tree()
        self.assertEqual(["hooks/c.h", "state/a.h", "state/b.h", "tests/t.cc"],
                         tree.closure("tests/t.cc"))

    def test_a_circle_ends(self):
        self.write("state/b.h", '#include "state/a.h"\n')
        self.assertEqual(["state/a.h", "state/b.h"], self.tree().closure("state/a.h"))

    def test_source_for(self):
        tree = self.tree("state/a.cc", "tests/t.cc", "tests/z.cc")
        self.assertEqual("state/a.cc", tree.source_for("state/a.cc"))
        self.assertEqual("state/a.cc", tree.source_for("state/a.h"))  # its own
        self.assertEqual("tests/z.cc", tree.source_for("state/b.h"))  # includes it itself
        self.assertEqual("tests/t.cc", tree.source_for("hooks/c.h"))
        self.assertIsNone(tree.source_for("README.md"))
        # Only by way of another header.
        self.assertEqual("state/a.cc", self.tree("state/a.cc").source_for("state/b.h"))

    def test_header_command(self):
        tree = compilation.Tree(self.root, [
            command("state/a.cc", "-DOWN"), command("state/x.cc", "-DUSUAL"),
            command("state/y.cc", "-DUSUAL"), command("state/z.cc", "-DODD")])
        own = tree.header_command("state/a.h")
        self.assertIn("-DOWN", own)
        self.assertNotIn("state/a.cc", own)
        self.assertIn("-DUSUAL", tree.header_command("state/b.h"))
        with self.assertRaisesRegex(LookupError, "no compiled file in hooks/"):
            tree.header_command("hooks/c.h")

    def key(self, name="state/a.cc", extra=(), kind="tidy", flags=()):
        tree = compilation.Tree(self.root, [command(name, *flags)])
        return tree.key(kind, name, tree.commands[name], extra)

    def test_keys(self):
        before = self.key()
        self.assertEqual(before, self.key())
        self.assertNotEqual(before, self.key(kind="header"))
        self.assertNotEqual(before, self.key(flags=["-DX"]))
        self.assertNotEqual(before, self.key(extra=["tests/z.cc"]))
        self.assertEqual(self.key(flags=["-isystem", "/one/external/absl"]),
                         self.key(flags=["-isystem", "/other/external/absl"]))
        self.write("tests/z.cc", "int other;\n")  # not of its closure
        self.assertEqual(before, self.key())
        self.write("state/b.h", "int other();\n")
        self.assertNotEqual(before, self.key())

    def test_headers_that_compile_alone(self):
        self.write("state/a.h", "#include <vector>\ninline std::vector<int> a() { return {}; }\n")
        self.write("state/b.h", "inline std::vector<int> b() { return {}; }\n")
        tree = self.tree("state/a.cc")
        jobs = [(h, h.replace("/", "-"), tree.header_command(h)) for h in ["state/a.h", "state/b.h"]]
        passed = compilation.Passed(self.root / "passed")
        run, failed = compilation.run_checks(jobs, passed, self.root)
        self.assertEqual(2, run)
        self.assertEqual(1, len(failed))
        self.assertIn("state/b.h", failed[0])
        self.assertIn("vector", failed[0])
        # What has passed is not run again; what has failed is.
        run, failed = compilation.run_checks(jobs, passed, self.root)
        self.assertEqual((1, 1), (run, len(failed)))

    def test_changed_files(self):
        def git(*arguments):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                           cwd=self.root, check=True, stdout=subprocess.DEVNULL)
        presubmit_root, presubmit.ROOT = presubmit.ROOT, self.root
        self.addCleanup(setattr, presubmit, "ROOT", presubmit_root)
        git("init", "-q", "-b", "main")
        git("add", ".")
        git("commit", "-q", "-m", "all")
        self.assertEqual([], presubmit.changed_files(None))
        git("checkout", "-q", "-b", "change")
        self.write("state/a.cc", "int a;\n")
        git("commit", "-q", "-a", "-m", "a")
        self.write("state/b.h", "int b;\n")
        self.write("state/new.cc", "int n;\n")
        (self.root / "tests/z.cc").unlink()
        self.assertEqual(["state/b.h", "state/new.cc"], presubmit.changed_files(None))
        self.assertEqual(["state/a.cc", "state/b.h", "state/new.cc"],
                         presubmit.changed_files("main"))
        with self.assertRaisesRegex(SystemExit, "git knows no 'nowhere'"):
            presubmit.changed_files("nowhere")


class PresubmitTest(unittest.TestCase):
    def run_with(self, checks, *arguments):
        old, presubmit.CHECKS = presubmit.CHECKS, checks
        self.addCleanup(setattr, presubmit, "CHECKS", old)
        out, sys.stdout = sys.stdout, types.SimpleNamespace(text="")
        sys.stdout.write = lambda text: setattr(
            sys.stdout, "text", sys.stdout.text + text)
        sys.stdout.flush = lambda: None
        try:
            return presubmit.main(list(arguments)), sys.stdout.text
        finally:
            sys.stdout = out

    CHECKS = {"one": lambda _: ("2 files", ""), "two": lambda _: ("", "x.cc is wrong\n"),
              "three": lambda _: ("", "")}

    def test_each_check_has_a_line_and_one_failure_fails(self):
        status, text = self.run_with(self.CHECKS)
        self.assertEqual(1, status)
        self.assertRegex(text, r"^one       ok +\d+\.\d s  2 files\nx.cc is wrong\n"
                               r"two       FAILED +\d+\.\d s\nthree     ok +\d+\.\d s\n$")

    def test_only_those_named(self):
        status, text = self.run_with(self.CHECKS, "three")
        self.assertEqual(0, status)
        self.assertRegex(text, r"^three     ok .*\n$")
        with self.assertRaisesRegex(SystemExit, r"unknown check 'four' \(known: one, two"):
            self.run_with(self.CHECKS, "four")

    def test_sanitizers(self):
        for name in ["asan", "ubsan", "tsan"]:
            words = presubmit.sanitizer_command(name, ["//x"])
            self.assertIn(f"--config={name}", words)
            self.assertEqual("//x", words[-1])
        self.assertIn("--test_tag_filters=multirank", " ".join(
            presubmit.sanitizer_command("tsan", [])))


class CompileCommandsTest(unittest.TestCase):
    def test_arguments(self):
        self.assertEqual(
            ["/usr/bin/gcc", "-iquote", ".", "-isystem", "/base/external/libtorch/include",
             "-Iexternal.h", "-I/base/external/x", "-iquote", "/out/bin", "-Wall", "-c", "a.cc"],
            compile_commands.clang_arguments(
                ["/usr/bin/gcc", "-MD", "-MF", "bazel-out/a.d", "-frandom-seed=bazel-out/a.o",
                 "-iquote", ".", "-isystem", "external/libtorch/include", "-Iexternal.h",
                 "-Iexternal/x", "-iquote", "bazel-out/bin", "-Wall", "-Werror",
                 "-fno-canonical-system-headers", "-c", "a.cc", "-o", "bazel-out/a.o"],
                "/base/external", "/out"))

    def test_entries(self):
        def action(source, *flags):
            return {"arguments": ["g++", *flags, "-c", source, "-o", "x.o"]}
        found = compile_commands.entries(
            [action("b.cc"), action("external/x/y.cc"), action("a.cc", "-fPIC"),
             action("a.cc"), {"arguments": ["ar", "x.a"]}], "/e", "/o", "/root")
        self.assertEqual(
            [{"directory": "/root", "file": "a.cc", "arguments": ["g++", "-fPIC", "-c", "a.cc"]},
             {"directory": "/root", "file": "b.cc", "arguments": ["g++", "-c", "b.cc"]}], found)


@unittest.skipUnless(shutil.which("clang-tidy-14"),
                     "no clang-tidy 14: tools/bootstrap --workshop installs it")
class ClangTidyTest(unittest.TestCase):
    def findings(self, text):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(ROOT / ".clang-tidy", folder)
            (pathlib.Path(folder) / "a.cc").write_text(text)
            run = subprocess.run(
                ["clang-tidy-14", "--quiet", "a.cc", "--", "-std=c++20"], cwd=folder,
                check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        found = [line.split("'")[1] if "'" in line else line
                 for line in run.stdout.splitlines() if "error:" in line]
        self.assertEqual(bool(found), run.returncode != 0, run.stdout + run.stderr)
        return found

    def test_names_as_they_should_be(self):
        self.assertEqual([], self.findings("""
            namespace composable {
            constexpr int kLimit = 3;
            enum class Kind { kOne, kTwo };
            struct Options { int world_size = 1; };
            template <typename T> class ParamGroup {
             public:
              explicit ParamGroup(T first) : first_(first) {}
              T first() const { return first_; }
              void MarkDirty() { ++num_dirty_; }
             private:
              static constexpr int kMost = 4;
              T first_;
              int num_dirty_ = kMost;
            };
            int fully_shard(int some_value) { const int local = some_value; return local; }
            double clip_grad_norm_(double norm) { return norm; }
            int UnshardAll() { return kLimit; }
            }  // namespace composable
        """))

    def test_names_as_they_should_not_be(self):
        self.assertEqual(
            ["Composable", "limit", "One", "options", "worldSize", "first", "markDirty",
             "unshardAll", "someValue", "Local"],
            self.findings("""
            namespace Composable {
            constexpr int limit = 3;
            enum class Kind { One };
            struct options { int worldSize = limit; };
            class Group {
              int first = 0;
             public:
              int markDirty() { return ++first; }
            };
            int unshardAll(int someValue) { const int Local = someValue; return Local; }
            }  // namespace Composable
        """))

    def test_other_findings(self):
        found = "\n".join(self.findings("struct A { A(int i) {} };\nint* p = 0;\n"))
        self.assertIn("single-argument constructors must be marked explicit", found)
        self.assertIn("use nullptr", found)


if __name__ == "__main__":
    unittest.main()
