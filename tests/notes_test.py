#!/usr/bin/env python3
"""Every Note that is mentioned has exactly one home, and every suppression a reason.

    notes_test.py --self-test   only the checks of this file itself

A home is a heading: a comment line that is nothing but "Note" and its title in brackets,
with prose below it and none directly above. Mentions are found in code, scripts and
Markdown, also where a line ends inside one; `Note [Like this]`, in backticks, is none.
A mention that names a file, as in "`state/fsdp_param.h`, Note [...]", names the home's.
"""

import re
import sys
import unittest

import tree

HOME = re.compile(r"\s*(?://|#) (Note \[[^\]]+\])")
COMMENT = re.compile(r"\s*(?://|#) \S")
MARKER = re.compile(r"^\s*(?://+|#+)?[ \t]*", re.MULTILINE)
MENTION = re.compile(r"(?:`([\w./]+)`,?\s+)?(?<![`\w])(Note\s+\[[^\]]+\])(?!`)")
READ = tree.CPP + (".md", ".bzl", ".py", ".sh", "BUILD", ".bazelrc")


def homes(text):
    """The titles whose home `text` is, in order."""
    lines = text.splitlines()
    found = []
    for i, line in enumerate(lines):
        match = HOME.fullmatch(line)
        if (match and (i == 0 or not COMMENT.match(lines[i - 1]))
                and i + 1 < len(lines) and COMMENT.match(lines[i + 1])):
            found.append(match.group(1))
    return found


def mentions(text):
    """Pairs of a file that is named as the home, or "", and the title."""
    flat = re.sub(r"\s+", " ", MARKER.sub("", text))
    return [(match.group(1) or "", re.sub(r"\s+", " ", match.group(2)))
            for match in MENTION.finditer(flat)]


def violations(texts):
    """What is wrong with the notes in `texts`, by file name; one line each."""
    home_of = {}
    found = []
    for name, text in texts.items():
        for title in homes(text):
            home_of.setdefault(title, []).append(name)
    for title, names in home_of.items():
        if len(names) > 1:
            found.append(f"{title} has several homes: {', '.join(names)}")
    for name, text in texts.items():
        for stated, title in mentions(text):
            if title not in home_of:
                found.append(f"{name} mentions {title}, which has no home: write it as a "
                             "comment line of its own, with the text below")
            elif stated and stated not in home_of[title]:
                found.append(f"{name} says that {title} is in {stated}, but its home is "
                             f"{home_of[title][0]}")
    return found


def suppression_violations(name, text):
    """Each suppression follows a comment, and is of what this project did not write."""
    found = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            continue
        if i == 0 or not lines[i - 1].startswith("# "):
            found.append(f"{name}:{i + 1}: no reason in the line before {line}")
        if re.search(r"composable|collectives/|state/|hooks/|examples/|tests/", line):
            found.append(f"{name}:{i + 1}: {line} suppresses code of this project")
    return found


class NotesTest(unittest.TestCase):
    def test_notes(self):
        texts = {name: tree.read(name) for name in tree.files()
                 if name.endswith(READ) and name != "tests/notes_test.py"}
        self.assertGreater(len([t for text in texts.values() for t in homes(text)]), 5)
        self.assertGreater(len([m for text in texts.values() for m in mentions(text)]), 10)
        found = violations(texts)
        self.assertFalse(found, "\n" + "\n".join(found))

    def test_suppressions(self):
        names = [name for name in tree.files()
                 if name.startswith("tools/suppressions/") and name.endswith(".supp")]
        self.assertEqual(["asan", "lsan", "tsan", "ubsan"],
                         [name.split("/")[-1][:-5] for name in names])
        found = [line for name in names
                 for line in suppression_violations(name, tree.read(name))]
        self.assertFalse(found, "\n" + "\n".join(found))


class SelfTest(unittest.TestCase):
    GOOD = {"a.h": "// What.\n//\n// Note [One thing]\n// Is so.\n#pragma once\n",
            "b.h": "// Why. See Note [One\n// thing]. And more.\n",
            "c.md": "Home: `a.h`, Note [One\nthing]. Written as `Note [Title]`.\n"}

    def test_good(self):
        self.assertEqual([], violations(self.GOOD))
        self.assertEqual(["Note [One thing]"], homes(self.GOOD["a.h"]))
        self.assertEqual([("", "Note [One thing]")], mentions(self.GOOD["b.h"]))
        self.assertEqual([("a.h", "Note [One thing]")], mentions(self.GOOD["c.md"]))

    def test_without_a_home(self):
        del_home = dict(self.GOOD, **{"a.h": "// What.\n"})
        self.assertEqual(["b.h", "c.md"], [v.split(" ")[0] for v in violations(del_home)])

    def test_two_homes(self):
        found = violations(dict(self.GOOD, **{"d.cc": self.GOOD["a.h"]}))
        self.assertEqual(["Note [One thing] has several homes: a.h, d.cc"], found)

    def test_a_mention_is_not_a_home(self):
        for text in ["// See\n// Note [X]\n// and so on.\n", "// Note [X] is elsewhere.\n",
                     "// Note [X]\nint i;\n"]:
            self.assertEqual([], homes(text), text)
        self.assertEqual(["Note [X]"], homes("int i;\n  // Note [X]\n  // Text.\n"))

    def test_another_home_is_named(self):
        found = violations(dict(self.GOOD, **{"d.md": "`b.h`, Note [One thing]"}))
        self.assertEqual(
            ["d.md says that Note [One thing] is in b.h, but its home is a.h"], found)

    def test_suppressions(self):
        self.assertEqual([], suppression_violations("x", "# Head.\n\n# Why.\nleak:c10::\n"))
        self.assertEqual(["x:2: no reason in the line before leak:c10::"],
                         suppression_violations("x", "\nleak:c10::\n"))
        self.assertEqual(["x:2: race:composable:: suppresses code of this project"],
                         suppression_violations("x", "# Why.\nrace:composable::\n"))


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
