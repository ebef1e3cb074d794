#!/usr/bin/env python3
"""tools/summarize_tests: what counts as passed, failed and skipped."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

SUMMARIZE = os.path.join(os.getcwd(), "tools", "summarize_tests")


class Summary(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(self.folder.cleanup)
        self.events = []

    def result(self, label, status, cases, attempt=1, shard=1):
        """One attempt of one shard. `cases`: the inner XML of each test case."""
        path = os.path.join(self.folder.name, f"{len(self.events)} test.xml")
        with open(path, "w", encoding="utf-8") as file:
            inner = "".join(f'<testcase name="t">{case}</testcase>' for case in cases)
            file.write(f"<testsuites><testsuite>{inner}</testsuite></testsuites>")
        identity = {"label": label, "run": 1, "shard": shard, "attempt": attempt}
        output = [{"name": "test.xml", "uri": "file://" + path.replace(" ", "%20")}]
        self.events.append(
            {
                "id": {"testResult": identity},
                "testResult": {"status": status, "testActionOutput": output},
            }
        )

    def target(self, label, **event):
        self.events.append({"id": {"targetCompleted": {"label": label}}, **event})

    def expect(self, output, status=0, page=None):
        path = os.path.join(self.folder.name, "events")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(json.dumps(e) for e in self.events) + '\n{"cut off')
        options = [f"--status={status}"]
        if page is not None:
            options.append("--named-in=" + os.path.join(self.folder.name, "page.md"))
            with open(options[-1].split("=")[1], "w", encoding="utf-8") as file:
                file.write(page)
        result = subprocess.run(
            [SUMMARIZE, *options, path], capture_output=True, text=True, check=False
        )
        self.assertEqual(result.stdout, output + "\n")
        self.assertEqual(result.returncode, " 0 failed" not in output)

    def test_counts_cases_of_all_targets_and_shards(self):
        self.result("//a", "PASSED", ["", "", "<skipped/>"], shard=1)
        self.result("//a", "PASSED", [""], shard=2)
        self.result("//b", "FAILED", ["", "<failure/>", "<error/>"])
        self.expect("4 passed, 2 failed, 1 skipped", status=3)

    def test_last_attempt_counts(self):
        self.result("//a", "FAILED", ["<failure/>"], attempt=1)
        self.result("//a", "PASSED", [""], attempt=2)
        self.expect("1 passed, 0 failed")

    def test_target_that_failed_without_a_failed_case_counts_one(self):
        self.result("//crashed", "FAILED", ["", ""])
        self.result("//timed_out", "TIMEOUT", [])
        self.expect("2 passed, 2 failed", status=3)

    def test_target_that_was_not_built_counts_one(self):
        self.target("//broken", completed={"success": False})
        self.target("//fine", completed={"success": True})
        self.target("//needs_cuda", aborted={"reason": "SKIPPED"})
        self.target("//unfinished", aborted={"reason": "INCOMPLETE"})
        self.events.append(
            {"id": {"testSummary": {"label": "//broken"}}, "testSummary": {"overallStatus": "NO_STATUS"}}
        )
        self.expect("0 passed, 2 failed", status=1)

    def test_bad_status_is_never_without_a_failure(self):
        self.expect("0 passed, 1 failed", status=1)

    def test_named_tests_must_have_run(self):
        path = os.path.join(self.folder.name, "gtest.xml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                '<testsuites><testcase classname="A" name="One"/>'
                '<testcase classname="All/B" name="Two/Case"/>'
                '<testcase classname="A" name="Off" status="notrun"/></testsuites>'
            )
        self.events.append(
            {
                "id": {"testResult": {"label": "//a", "run": 1, "shard": 1, "attempt": 1}},
                "testResult": {
                    "status": "PASSED",
                    "testActionOutput": [{"name": "test.xml", "uri": "file://" + path}],
                },
            }
        )
        self.expect("2 passed, 0 failed, 1 skipped", page="`A.No`\n| `A.No` | `A.One` `B.Two`, `B/Case` `x` |")
        self.expect(
            "A.Off is named but did not run\nB/Other is named but did not run\n"
            "2 passed, 2 failed, 1 skipped",
            page="| x | `A.One`, `A.Off`, `B/Other` |",
        )


if __name__ == "__main__":
    sys.exit(unittest.main())
