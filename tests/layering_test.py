#!/usr/bin/env python3
"""Dependencies between the rooms point one way, and headers stay cheap.

    layering_test.py --self-test   only the checks of this file itself

Reads the #include lines of all sources that it finds below its working folder.
"""
import os
import re
import sys
import unittest

# Each room may include itself and those before it.
ROOMS = ["collectives", "state", "hooks", "composable", "examples", "tools"]
# Beside the rooms, and free to include all of them.
OUTSIDE = ["benchmarks", "tests"]
# examples and tools do not know each other.
STRANGERS = {("examples", "tools"), ("tools", "examples")}
# Not for headers of the library: it costs ~30 s in every file that includes it.
COSTLY = "torch/torch.h"
MAY_BE_COSTLY = ["examples", "tests"]

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
SOURCE = re.compile(r"\.(h|hpp|cc|cu|cuh|inc)$")


def includes(text):
    return INCLUDE.findall(text)


def violations(path, text):
    """What is wrong with the includes of the file at `path`, one line each."""
    room = path.split("/")[0]
    found = []
    for included in includes(text):
        target = included.split("/")[0]
        if room in ROOMS and (target in OUTSIDE or (
                target in ROOMS and (ROOMS.index(target) > ROOMS.index(room)
                                     or (room, target) in STRANGERS))):
            found.append(f"{path} includes {included}, but {room} may not "
                         f"depend on {target}")
        if (included == COSTLY and path.endswith((".h", ".hpp", ".cuh"))
                and room not in MAY_BE_COSTLY):
            found.append(f"{path} includes {COSTLY}: include what is used")
        if included.startswith("."):
            found.append(f"{path} includes {included}: write paths from the "
                         "workspace's root")
    return found


def sources():
    for folder, _, names in os.walk("."):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), ".")
            if SOURCE.search(name) and path.split("/")[0] in ROOMS + OUTSIDE:
                yield path


class LayeringTest(unittest.TestCase):
    def test_rooms(self):
        found = []
        seen = {}
        for path in sources():
            with open(path, encoding="utf-8") as file:
                text = file.read()
            found += violations(path, text)
            room = path.split("/")[0]
            seen[room] = seen.get(room, 0) + 1
        self.assertEqual([], found, "\n" + "\n".join(found))
        # The test was given something to read.
        for room, least in [("collectives", 10), ("state", 20), ("hooks", 15),
                            ("composable", 12), ("examples", 3)]:
            self.assertGreaterEqual(seen.get(room, 0), least, room)


class SelfTest(unittest.TestCase):
    def test_includes(self):
        self.assertEqual(
            includes('#include "a/b.h"\n  #  include <c>\n// #include "no.h"\n'
                     'const char* s = "#include";\n#include "d.h"  // why\n'),
            ["a/b.h", "c", "d.h"])

    def test_each_room_may_include_those_before_it(self):
        for i, room in enumerate(ROOMS):
            for j, target in enumerate(ROOMS):
                text = f'#include "{target}/x.h"\n'
                allowed = j <= i and (room, target) not in STRANGERS
                self.assertEqual(violations(f"{room}/y.cc", text) == [], allowed,
                                 f"{room} -> {target}")

    def test_rooms_know_no_tests_but_tests_know_rooms(self):
        self.assertTrue(violations("state/y.h", '#include "tests/support/ranks.h"'))
        self.assertTrue(violations("examples/y.cc", '#include "benchmarks/b.h"'))
        self.assertFalse(violations("tests/state/y.cc", '#include "composable/a.h"'))

    def test_costly_header(self):
        text = "#include <torch/torch.h>\n"
        for room in ["collectives", "state", "hooks", "composable", "tools"]:
            self.assertTrue(violations(f"{room}/y.h", text), room)
            self.assertFalse(violations(f"{room}/y.cc", text), room)
        for room in ["examples", "tests"]:
            self.assertFalse(violations(f"{room}/y.h", text), room)

    def test_relative_paths(self):
        self.assertTrue(violations("state/y.cc", '#include "../hooks/guard.h"'))


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        unittest.main(argv=sys.argv[:1], defaultTest="SelfTest")
    unittest.main()
