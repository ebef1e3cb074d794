#!/usr/bin/env python3
"""Every test that docs/design.md names as showing a rule exists.

    rules_test.py --self-test   only the checks of this file itself

A rule without a test says "later".
"""

import re
import sys
import unittest

import tree

ROW = re.compile(r"(?m)^\| (\d+) \| (.+) \| (.+) \|$")


def rules(text):
    """Triples of number, rule and what shows it, from the section "Rules"."""
    section = re.search(r"(?ms)^## Rules\n(.*?)(?=^## |\Z)", text)
    return [(int(n), rule, shown) for n, rule, shown in ROW.findall(section.group(1))]


def violations(text, known):
    table = rules(text)
    found = []
    if [n for n, _, _ in table] != list(range(1, len(table) + 1)):
        found.append(f"rules are not numbered from 1 on: {[n for n, _, _ in table]}")
    for number, _, shown in table:
        names = tree.NAME.findall(shown)
        if not names and "later" not in shown:
            found.append(f"rule {number} names no test")
        found += [f"rule {number} names {name}, which is no test"
                  for name in names if name not in known]
    return found


class RulesTest(unittest.TestCase):
    def test_rules(self):
        text = tree.read("docs/design.md")
        self.assertGreaterEqual(len(rules(text)), 20)
        found = violations(text, tree.known_tests())
        self.assertFalse(found, "\n" + "\n".join(found))


class SelfTest(unittest.TestCase):
    KNOWN = tree.known_tests([
        'TEST(A, One) {}\nTEST_P(B,\n       Two) {}\nCase{"Three", 3};', 'x("Four");'])

    def check(self, *shown):
        rows = "".join(f"| {i + 1} | a rule | {cell} |\n" for i, cell in enumerate(shown))
        return violations(f"## Rules\n\n| | rule | shown by |\n|---|---|---|\n{rows}\n## Next\n"
                          "| 9 | a | `No.Test` |\n", self.KNOWN)

    def test_good(self):
        self.assertEqual([], self.check("`A.One`, `B.Two`", "later", "`B/Three`"))

    def test_missing(self):
        self.assertEqual(
            ["rule 2 names A.Two, which is no test", "rule 2 names B/Four, which is no test",
             "rule 2 names A/Three, which is no test"],
            self.check("`A.One`", "`A.Two`, `B/Four`, `A/Three`"))
        self.assertEqual(["rule 1 names no test"], self.check("a test"))

    def test_numbers(self):
        self.assertIn("not numbered", violations(
            "## Rules\n| 2 | a | `A.One` |\n", self.KNOWN)[0])


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
