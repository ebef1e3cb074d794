"""The files of the working tree, for checks that read all of them.

Tests that use it read the clone itself and not their runfiles, so that no file is
forgotten in a list; they are tagged so that Bazel runs them each time.
"""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPP = (".h", ".hpp", ".cc", ".cu", ".cuh")


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
