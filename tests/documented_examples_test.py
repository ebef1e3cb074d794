#!/usr/bin/env python3
"""What the documentation shows as an example is compiled.

    documented_examples_test.py --self-test   only the checks of this file itself

Markdown: a fenced block that follows a comment of the form
  <!-- example: PATH NAME -->
equals the lines of PATH between "// example-begin NAME" and "// example-end".

Headers: each block of code in a header's opening comment is a region named after the
header, in some source below tests/ or examples/ (mostly tests/header_examples_test.cc).
White space may differ, since the region is formatted where it stands. A block is what is
indented by three or more; it is code if a line of it ends in ";", "{" or "}". Blocks that
have prose between them are examples, and regions, of their own.
"""

import re
import sys
import textwrap
import unittest

import tree

BEGIN = re.compile(r"\s*// example-begin (\S+)")
END = re.compile(r"\s*// example-end")
MARKDOWN = re.compile(r"<!-- example: (\S+) (\S+) -->\n```cpp\n(.*?)\n```", re.DOTALL)
FENCED_CPP = re.compile(r"^```cpp$", re.MULTILINE)


def regions(text):
    """Pairs of name and text of the regions of a source file, in order."""
    found = []
    name, lines = None, []
    for line in text.splitlines():
        if BEGIN.fullmatch(line):
            name, lines = BEGIN.fullmatch(line).group(1), []
        elif END.fullmatch(line) and name:
            found.append((name, textwrap.dedent("\n".join(lines))))
            name = None
        elif name:
            lines.append(line)
    return found


def header_examples(text):
    """The blocks of code in the opening comment of a header."""
    blocks = [[]]
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        body = line[2:].rstrip()
        if body.startswith("   "):
            blocks[-1].append(body)
        elif body:  # prose
            blocks.append([])
        elif blocks[-1]:  # blank, maybe inside a block
            blocks[-1].append(body)

    def is_code(block):
        return any(re.sub(r"\s+//.*", "", line).endswith((";", "{", "}")) for line in block)

    return [textwrap.dedent("\n".join(block)).strip() for block in blocks if is_code(block)]


def squeezed(code):
    """Without white space, and without #include lines, which a source has at its top."""
    return "".join(re.sub(r"(?m)^#include .*$", "", code).split())


def lacks_include(example, text):
    """A header that an example includes and the source `text` does not, or None."""
    for line in re.findall(r"(?m)^#include .*$", example):
        if not re.search("(?m)^" + re.escape(line), text):
            return line
    return None


def header_violations(headers, sources):
    """What is wrong with the examples of `headers`, given `sources`; by file name."""
    by_name = {}
    found = []
    for source, text in sources.items():
        for name, region in regions(text):
            by_name.setdefault(name, []).append((source, region))
            if name.endswith(".h") and name not in headers:
                found.append(f"{source}: example-begin {name}: there is no such header")
    for header, text in headers.items():
        examples = header_examples(text)
        own = by_name.get(header, [])
        for example in examples:
            if not any(squeezed(example) == squeezed(region)
                       and not lacks_include(example, sources[source])
                       for source, region in own):
                found.append(
                    f"{header}: no compiled region `// example-begin {header}` is this "
                    "example; add it to tests/header_examples_test.cc, or change one:\n"
                    + textwrap.indent(example, "    ") + "".join(
                        f"\n  {source} has:\n" + textwrap.indent(region, "    ")
                        for source, region in own))
        for source, region in own:
            if squeezed(region) not in [squeezed(example) for example in examples]:
                found.append(f"{source}: the region {header} is no example of that header:\n"
                             + textwrap.indent(region, "    "))
    return found


def markdown_violations(name, text, sources):
    found = []
    examples = MARKDOWN.findall(text)
    if len(examples) != len(FENCED_CPP.findall(text)):
        found.append(f"{name}: a ```cpp block has no line <!-- example: PATH NAME --> above it")
    for path, region_name, example in examples:
        if (region_name, example) not in regions(sources.get(path, "")):
            found.append(f"{name}: the example {region_name} differs from {path}")
    return found


class DocumentedExamplesTest(unittest.TestCase):
    def setUp(self):
        names = tree.files()
        self.headers = {n: tree.read(n) for n in names if n.endswith(".h")}
        self.sources = {n: tree.read(n) for n in names
                        if n.startswith(("tests/", "examples/")) and n.endswith((".cc", ".h"))}
        self.markdown = {n: tree.read(n) for n in names if n.endswith(".md")}

    def test_headers(self):
        self.assertGreater(sum(len(header_examples(t)) for t in self.headers.values()), 30)
        found = header_violations(self.headers, self.sources)
        self.assertFalse(found, "\n" + "\n".join(found))

    def test_markdown(self):
        self.assertTrue(MARKDOWN.findall(self.markdown["README.md"]))
        found = [line for name, text in self.markdown.items()
                 for line in markdown_violations(name, text, self.sources)]
        self.assertFalse(found, "\n" + "\n".join(found))


class SelfTest(unittest.TestCase):
    def test_what_is_code(self):
        self.assertEqual(["F f;   // one\n\nf();"], header_examples(
            "// What.\n//\n//   F f;   // one\n//\n//   f();\n// Prose.\n//\n"
            "//   a, b   they are; and\n//   c      is not\n#pragma once\n"))
        self.assertEqual([], header_examples("#pragma once\n//   f();\n"))

    def test_regions(self):
        self.assertEqual([("x", "a;\n  b;"), ("y", "c;")], regions(
            "  // example-begin x\n  a;\n    b;\n  // example-end\n"
            "// example-begin y\nc;\n// example-end\n"))

    def check(self, header, region):
        return header_violations(
            {"a.h": f"// What.\n//\n{header}#pragma once\n"},
            {"tests/t.cc": f"// example-begin a.h\n{region}// example-end\n" if region else ""})

    def test_headers(self):
        self.assertEqual([], self.check("//   f(1,\n//     2);\n", "f(1, 2);\n"))
        self.assertIn("no compiled region", self.check("//   f();\n", "")[0])
        self.assertEqual(2, len(self.check("//   f();\n", "g();\n")))
        self.assertIn("no example of that header", self.check("// Prose.\n", "f();\n")[0])
        self.assertIn("no such header", header_violations(
            {}, {"tests/t.cc": "// example-begin a.h\nf();\n// example-end\n"})[0])

    def test_includes(self):
        header = '//   #include "a.h"\n//\n//   f();\n'
        region = "// example-begin a.h\nf();\n// example-end\n"
        headers = {"a.h": f"// What.\n//\n{header}#pragma once\n"}
        self.assertEqual([], header_violations(
            headers, {"tests/t.cc": f'#include "a.h"\n{region}'}))
        self.assertEqual(1, len(header_violations(headers, {"tests/t.cc": region})))

    def test_each_block_has_a_region(self):
        header = "//   f();\n// and\n//   g();\n"
        self.assertEqual(1, len(self.check(header, "f();\n")))

    def test_markdown(self):
        text = "<!-- example: t.cc x -->\n```cpp\nf();\n```\n"
        good = {"t.cc": "  // example-begin x\n  f();\n  // example-end\n"}
        bad = {"t.cc": "  // example-begin x\n  g();\n  // example-end\n"}
        self.assertEqual([], markdown_violations("r.md", text, good))
        self.assertIn("differs", markdown_violations("r.md", text, bad)[0])
        self.assertIn("differs", markdown_violations("r.md", text, {})[0])
        self.assertIn("has no line", markdown_violations("r.md", "```cpp\nf();\n```\n", {})[0])


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
