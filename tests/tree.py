"""The files of the working tree, for checks that read all of them.

Tests that use it read the clone itself and not their runfiles, so that no file is
forgotten in a list; they are tagged so that Bazel runs them each time.
"""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPP = (".h", ".hpp", ".cc", ".cu", ".cuh")

# How tables name what shows a row: `Suite.Test` is a TEST, TEST_F or TEST_P; `Suite/Case` is
# a row of a table: a string in a file that has a TEST_P of that suite.
NAME = re.compile(r"`(\w+[./]\w+)`")
_TEST = re.compile(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)")
_SUITE_WITH_CASES = re.compile(r"\bTEST_P\(\s*(\w+),")


def files():
    """Paths, relative to ROOT, of what git tracks or would add; sorted."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if listed.returncode == 0:
        names = set(listed.stdout.split("\0")) - {""}
    else:  # an unpacked archive
        names = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if not path.relative_to(ROOT).parts[0].startswith((".git", "bazel-"))}
    return sorted(name for name in names if (ROOT / name).is_file())


def cpp_files():
    return [name for name in files() if name.endswith(CPP)]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def known_tests(sources=None):
    """What NAME may find in a table, of texts or else of all C++ files in tests/."""
    if sources is None:
        sources = [read(name) for name in cpp_files() if name.startswith("tests/")]
    known = set()
    for text in sources:
        known.update(f"{suite}.{test}" for suite, test in _TEST.findall(text)
                     if not test.startswith("DISABLED_"))
        cases = re.findall(r'"(\w+)"', text)
        for suite in _SUITE_WITH_CASES.findall(text):
            known.update(f"{suite}/{case}" for case in cases)
    return known
