#!/usr/bin/env python3
"""C++ files are as clang-format 14 writes them; Python and shell scripts can be parsed.

    format_test.py --self-test   only the checks of this file itself

Without clang-format 14 (tools/bootstrap --workshop installs it) the C++ files are not
looked at, which is said.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import tree


def find_clang_format():
    """The command, or None where there is no version 14."""
    for name in ("clang-format-14", "clang-format"):
        command = shutil.which(name)
        if command and " version 14." in subprocess.run(
                [command, "--version"], check=True, text=True,
                stdout=subprocess.PIPE).stdout:
            return command
    return None


def misformatted(command, paths):
    """Those of `paths` that clang-format would change."""
    run = subprocess.run(
        [command, "--dry-run", "-ferror-limit=1", *paths], cwd=tree.ROOT, check=False,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = []
    for line in run.stdout.splitlines():
        if "[-Wclang-format-violations]" in line:
            found.append(line.split(":")[0])
        elif "error:" in line:
            found.append(line)
    return sorted(set(found))


def language(name, text):
    """"python", "bash" or None."""
    first = text.partition("\n")[0]
    if name.endswith(".py") or first.startswith("#!") and "python" in first:
        return "python"
    if name.endswith(".sh") or first.startswith("#!") and "bash" in first:
        return "bash"
    return None


def syntax_error(name, text):
    """What is wrong with a script, or None."""
    kind = language(name, text)
    if kind == "python":
        try:
            compile(text, name, "exec")
        except SyntaxError as error:
            return f"{name}:{error.lineno}: {error.msg}"
    if kind == "bash":
        run = subprocess.run(["bash", "-n"], input=text, check=False, text=True,
                             stderr=subprocess.PIPE)
        if run.returncode != 0:
            return f"{name}: {run.stderr.strip()}"
    return None


class FormatTest(unittest.TestCase):
    def test_cpp(self):
        command = find_clang_format()
        if command is None:
            self.skipTest("no clang-format 14: tools/bootstrap --workshop installs it")
        paths = tree.cpp_files()
        self.assertGreater(len(paths), 80)
        found = misformatted(command, paths)
        self.assertFalse(found, "\nto put it right: clang-format-14 -i " + " ".join(found))

    def test_scripts(self):
        found = []
        kinds = []
        for name in tree.files():
            if "." in pathlib.Path(name).name and not name.endswith((".py", ".sh")):
                continue
            text = tree.read(name)
            kinds.append(language(name, text))
            found.append(syntax_error(name, text))
        self.assertGreater(kinds.count("python"), 5)
        self.assertGreater(kinds.count("bash"), 3)
        found = [error for error in found if error]
        self.assertFalse(found, "\n" + "\n".join(found))


class SelfTest(unittest.TestCase):
    def test_syntax(self):
        self.assertEqual("a.py:2: invalid syntax", syntax_error("a.py", "x = 1\nx = = 1\n"))
        self.assertEqual("tool:2: invalid syntax",
                         syntax_error("tool", "#!/usr/bin/env python3\nx = = 1\n"))
        self.assertIn("tool: bash:", syntax_error("tool", "#!/usr/bin/env bash\nif true\n"))
        self.assertIsNone(syntax_error("a.sh", "if true; then :; fi\n"))
        self.assertIsNone(syntax_error("BUILD", "x = = 1\n"))

    def test_clang_format(self):
        command = find_clang_format()
        if command is None:
            self.skipTest("no clang-format 14")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(tree.ROOT / ".clang-format", folder)
            good, bad = pathlib.Path(folder) / "good.cc", pathlib.Path(folder) / "bad.cc"
            good.write_text("int* p = nullptr;\n")
            bad.write_text("int *p = nullptr;\nint  q;\n")
            self.assertEqual([str(bad)], misformatted(command, [good, bad]))


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
