#!/usr/bin/env python3
"""docs/parity.md answers every item, and each test that it names exists.

    parity_test.py --self-test   only the checks of this file itself

A row has three columns: the item, what is ours, and what shows it: tests (see tree.NAME),
or `open: FEATURE` for what waits for a feature, or `not portable: REASON`.
That the tests ran is checked by tools/test.
"""

import re
import sys
import unittest

import tree

OPEN = {"replicate", "checkpoint", "tensor parallel", "state dict", "cuda"}
ROW = re.compile(r"(?m)^\| (?!-|item )(.+?) \| (.+) \| (.+) \|$")
# Sections whose items are numbered, and the numbers that must be there.
NUMBERED = {
    "Weaknesses": [f"W{i}" for i in range(1, 44)],
    "Traps": [f"T{i}" for i in range(1, 20)],
    "Bug reports": [f"{kind}{i}" for kind, count in (
        ("A", 13), ("B", 13), ("C", 11), ("D", 10), ("E", 10), ("F", 6), ("G", 13), ("H", 6),
        ("I", 5), ("J", 10), ("K", 6), ("L", 8), ("M", 5), ("N", 2), ("LT", 8))
        for i in range(1, count + 1)],
}


def sections(text):
    """Rows by section: triples of item, ours, shown."""
    parts = re.split(r"(?m)^## (.+)$", text)[1:]
    return {title.strip(): ROW.findall(body) for title, body in zip(parts[::2], parts[1::2])}


def row_violations(item, shown, known):
    names = tree.NAME.findall(shown)
    waits = re.search(r"open: ([A-Za-z ]+)", shown)
    reason = re.search(r"not portable: \w+", shown)
    found = [f"{item}: {name} is no test" for name in names if name not in known]
    if waits and waits.group(1).strip() not in OPEN:
        found.append(f"{item}: '{waits.group(1).strip()}' is no open feature")
    if not (names or waits or reason):
        found.append(f"{item}: names no test, open feature or reason")
    return found


def violations(text, known):
    found = []
    by_section = sections(text)
    for title, rows in by_section.items():
        items = [item for item, _, _ in rows]
        found += [f"{title}: {item} has two rows" for item in sorted(set(items))
                  if items.count(item) > 1]
        for item, _, shown in rows:
            found += row_violations(item, shown, known)
    for title, numbers in NUMBERED.items():
        items = {item.split(" ")[0] for item, _, _ in by_section.get(title, [])}
        found += [f"{title}: {number} has no row" for number in numbers if number not in items]
    return found


class ParityTest(unittest.TestCase):
    def test_parity(self):
        found = violations(tree.read("docs/parity.md"), tree.known_tests())
        self.assertFalse(found, "\n" + "\n".join(found))


class SelfTest(unittest.TestCase):
    def check(self, *rows):
        text = "# Title\n\n## API\n\n| item | ours | shown by |\n|---|---|---|\n"
        text += "".join(f"| {item} | ours | {shown} |\n" for item, shown in rows)
        return [line for line in violations(text, {"A.One", "B/Case"}) if "has no row" not in line]

    def test_good(self):
        self.assertEqual([], self.check(("a", "`A.One`, `B/Case`"), ("b", "open: checkpoint"),
                                        ("c", "not portable: CUDA graphs"),
                                        ("d", "`A.One`; open: state dict")))

    def test_bad(self):
        self.assertEqual(
            ["API: c has two rows", "a: A.Two is no test", "b: 'luck' is no open feature",
             "c: names no test, open feature or reason"],
            self.check(("a", "`A.Two`"), ("b", "open: luck"), ("c", "a test"), ("c", "`A.One`")))

    def test_numbers(self):
        found = violations("## Traps\n| T1 text | ours | `A.One` |\n", {"A.One"})
        self.assertNotIn("Traps: T1 has no row", found)
        self.assertIn("Traps: T2 has no row", found)
        self.assertIn("Weaknesses: W42 has no row", found)


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
