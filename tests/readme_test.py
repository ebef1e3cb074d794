#!/usr/bin/env python3
"""The README's example is a region of a test that is compiled and run.

A fenced block of README.md that follows a comment of the form
  <!-- example: PATH NAME -->
must equal the lines of PATH between "example-begin NAME" and "example-end".
"""

import pathlib
import re
import sys
import textwrap


def region(path, name):
    lines = path.read_text().splitlines()
    begin = next(i for i, l in enumerate(lines)
                 if l.strip() == f"// example-begin {name}")
    end = next(i for i in range(begin, len(lines))
               if lines[i].strip() == "// example-end")
    return textwrap.dedent("\n".join(lines[begin + 1:end]))


def main():
    readme = pathlib.Path("README.md").read_text()
    pattern = r"<!-- example: (\S+) (\S+) -->\n```cpp\n(.*?)\n```"
    examples = re.findall(pattern, readme, re.DOTALL)
    assert examples, "README.md names no example"
    failed = 0
    for path, name, text in examples:
        if text != region(pathlib.Path(path), name):
            print(f"README.md: the example {name} differs from {path}")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
