#!/usr/bin/env python3
"""tools/run: variables, prefixes, failures, timeouts, signals, wrong arguments."""

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

RUN = os.path.join(os.getcwd(), "tools", "run")


def run(*arguments, env=None, wait=30):
    """The finished launcher: .returncode, .stdout, .stderr, .seconds."""
    start = time.monotonic()
    result = subprocess.run(
        [RUN, *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=wait,
    )
    result.seconds = time.monotonic() - start
    return result


def bash(script):
    return ["bash", "-c", script]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def still_running(pids, seconds=5.0):
    """Those of the processes that have not ended by then."""
    end = time.monotonic() + seconds
    while (left := [p for p in pids if is_running(p)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def flag_file(test):
    """The path of a file that isn't there yet, for ranks to wait for."""
    folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
    test.addCleanup(folder.cleanup)
    return os.path.join(folder.name, "flag")


class Environment(unittest.TestCase):
    VARIABLES = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT OMP_NUM_THREADS TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE"
    ).split()

    def values(self, nproc, env):
        script = "; ".join(f'echo "{v}=${{{v}-unset}}"' for v in self.VARIABLES)
        result = run(f"--nproc={nproc}", "--", *bash(script), env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        ranks = [{} for _ in range(nproc)]
        for line in result.stdout.splitlines():
            match = re.fullmatch(r"\[rank(\d)\]: (\w+)=(.*)", line)
            ranks[int(match[1])][match[2]] = match[3]
        return ranks

    def test_is_that_of_torchrun_without_an_agent(self):
        os.environ.pop("OMP_NUM_THREADS", None)
        ranks = self.values(2, {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7"})
        for rank, values in enumerate(ranks):
            self.assertEqual(values["RANK"], str(rank))
            self.assertEqual(values["LOCAL_RANK"], str(rank))
            self.assertEqual(values["WORLD_SIZE"], "2")
            self.assertEqual(values["LOCAL_WORLD_SIZE"], "2")
            self.assertEqual(values["GROUP_RANK"], "0")
            self.assertEqual(values["OMP_NUM_THREADS"], "1")
            self.assertEqual(values["TORCHELASTIC_USE_AGENT_STORE"], "unset")
            self.assertGreater(int(values["MASTER_PORT"]), 0)
        self.assertEqual(ranks[0]["MASTER_PORT"], ranks[1]["MASTER_PORT"])
        self.assertEqual(ranks[0]["TORCHELASTIC_RUN_ID"], ranks[1]["TORCHELASTIC_RUN_ID"])

    def test_keeps_a_number_of_threads_that_is_set(self):
        self.assertEqual(self.values(2, {"OMP_NUM_THREADS": "3"})[1]["OMP_NUM_THREADS"], "3")


class Output(unittest.TestCase):
    def test_every_line_of_both_streams_is_prefixed(self):
        result = run("--nproc=2", *bash("echo out; echo err >&2; printf unfinished"))
        self.assertEqual(
            sorted(result.stdout.splitlines()),
            sorted(f"[rank{r}]: {t}" for r in (0, 1) for t in ("out", "unfinished")),
        )
        self.assertEqual(sorted(result.stderr.splitlines()), ["[rank0]: err", "[rank1]: err"])

    def test_one_rank_is_not_prefixed(self):
        self.assertEqual(run(*bash("echo out")).stdout, "out\n")

    def test_rank_0_has_the_terminal(self):
        main, side = pty.openpty()
        script = "[ -t 1 ] && echo terminal $RANK || echo pipe $RANK"
        process = subprocess.Popen([RUN, "--nproc=2", *bash(script)], stdout=side, stderr=side)
        os.close(side)
        text = b""
        try:
            while chunk := os.read(main, 1024):
                text += chunk
        except OSError:
            pass  # how a terminal's end is told
        self.assertEqual(process.wait(), 0)
        self.assertEqual(sorted(text.decode().split("\r\n")), ["", "[rank1]: pipe 1", "terminal 0"])

    def test_arguments_are_handed_on(self):
        result = run("--nproc", "1", "--", "printf", "%s|", "--nproc=3", "--", "a b")
        self.assertEqual(result.stdout, "--nproc=3|--|a b|")


class Failure(unittest.TestCase):
    def test_first_one_is_reported_and_the_others_are_stopped(self):
        script = "if [ $RANK = 2 ]; then sleep 0.3; echo cause >&2; exit 7; fi; sleep 60"
        result = run("--nproc=3", *bash(script))
        self.assertEqual(result.returncode, 7)
        self.assertLess(result.seconds, 5)
        self.assertRegex(result.stderr, r"rank 2 failed first: exit status 7 after \d\.\d s")
        self.assertRegex(result.stderr, r"last lines of rank 2:\n    cause\n")

    def test_signal_is_named(self):
        result = run("--nproc=2", *bash("[ $RANK = 0 ] && kill -SEGV $$; sleep 60"))
        self.assertEqual(result.returncode, 128 + signal.SIGSEGV)
        self.assertIn("rank 0 failed first: signal SIGSEGV", result.stderr)

    def test_killed_rank_is_the_cause_even_if_others_end_before_it(self):
        # How a rank looks whose peer was killed, and whose end is seen first.
        script = (
            "case $RANK in "
            "0) echo '[rank 0] error: all-gather of x failed: Connection closed by peer' >&2; exit 1;; "
            "1) sleep 0.15; kill -KILL $$;; "
            "2) echo '  what():  reduce-scatter of y failed' >&2; kill -ABRT $$;; "
            "*) sleep 60;; esac"
        )
        result = run("--nproc=5", *bash(script))
        self.assertEqual(result.returncode, 128 + signal.SIGKILL)
        self.assertLess(result.seconds, 5)
        self.assertRegex(
            result.stderr,
            r"tools/run: rank 1 failed first: signal SIGKILL after \d\.\d s; "
            r"ranks 3 and 4 were stopped\n"
            r"tools/run: rank 0 failed after it: exit status 1: "
            r"\[rank 0\] error: all-gather of x failed: Connection closed by peer\n"
            r"tools/run: rank 2 failed after it: signal SIGABRT: "
            r"what\(\):  reduce-scatter of y failed\n",
        )

    def test_lost_connection_is_not_the_cause(self):
        for lost in (
            "Connection closed by peer [127.0.0.1]:1",
            "Connection reset by peer",
            "gone. If another rank has failed, its error is the cause.",
            "Rank 0 could not agree with the others on the 5th collective",
        ):
            script = (
                f"if [ $RANK = 0 ]; then echo 'error: {lost}' >&2; kill -ABRT $$; fi; "
                "sleep 0.15; echo 'error: disk full' >&2; exit 3"
            )
            result = run("--nproc=2", *bash(script))
            self.assertEqual(result.returncode, 3, lost)
            self.assertIn("rank 1 failed first: exit status 3", result.stderr)
            self.assertIn(f"rank 0 failed after it: signal SIGABRT: error: {lost}", result.stderr)

    def test_without_other_signs_the_earliest_is_the_cause(self):
        result = run("--nproc=3", *bash("sleep 0.$((9 - RANK * 2)); echo last; exit $((RANK + 4))"))
        self.assertEqual(result.returncode, 6)
        self.assertIn("rank 2 failed first: exit status 6", result.stderr)
        self.assertIn("rank 0 failed after it: exit status 4: last", result.stderr)
        self.assertIn("rank 1 failed after it: exit status 5: last", result.stderr)

    def test_rank_that_is_slow_to_end_after_its_error_is_quoted(self):
        script = (
            "if [ $RANK = 0 ]; then sleep 1.5; exit 9; fi; echo 'error: of before'; "
            "sleep 1.7; echo 'error: all-gather failed'; sleep 60"
        )
        result = run("--nproc=2", *bash(script))
        self.assertEqual(result.returncode, 9)
        self.assertLess(result.seconds, 8)
        self.assertIn("; rank 1 was stopped\n", result.stderr)
        self.assertIn("rank 1 before it was stopped: error: all-gather failed", result.stderr)
        self.assertEqual(result.stderr.count("of before"), 0)

    def test_error_is_found_among_other_lines_and_shortened(self):
        script = (
            "[ $RANK = 0 ] && exit 2; sleep 0.1; echo step 1; "
            "echo terminate called after throwing; echo '  what():  '$(printf %0500d 7); "
            "echo 'frame #0: f'; echo note; exit 1"
        )
        result = run("--nproc=2", *bash(script))
        self.assertRegex(
            result.stderr,
            r"rank 1 failed after it: exit status 1: what\(\):  0{391}\.\.\.\n",
        )

    def test_rank_that_ignores_sigterm_is_killed_after_the_grace(self):
        flag = flag_file(self)
        script = (
            f"if [ $RANK = 0 ]; then until [ -e {flag} ]; do sleep 0.05; done; exit 3; fi; "
            f"trap '' TERM; touch {flag}; while :; do sleep 0.1; done"
        )
        result = run("--nproc=2", *bash(script))
        self.assertEqual(result.returncode, 3)
        self.assertGreater(result.seconds, 4.9)
        self.assertLess(result.seconds, 15)

    def test_children_of_ranks_are_stopped_too(self):
        flag = flag_file(self)
        script = (
            "sleep 60 & echo pid $!; "
            f"if [ $RANK = 1 ]; then until [ -e {flag} ]; do sleep 0.05; done; exit 1; fi; "
            f"touch {flag}; wait"
        )
        result = run("--nproc=2", *bash(script))
        self.assertEqual(result.returncode, 1)
        pids = re.findall(r"pid (\d+)", result.stdout)
        self.assertEqual(len(pids), 2)
        self.assertEqual(still_running(pids), [])


class Stopping(unittest.TestCase):
    def test_timeout(self):
        result = run("--nproc=2", "--timeout=0.5", *bash("[ $RANK = 0 ] && exit 0; sleep 60"))
        self.assertEqual(result.returncode, 124)
        self.assertLess(result.seconds, 5)
        self.assertIn("timed out after 0.5 s; still running: rank 1", result.stderr)

    def test_signals_are_handed_on(self):
        script = "trap 'echo got it; exit 0' INT; echo ready; while :; do sleep 0.05; done"
        process = subprocess.Popen(
            [RUN, "--nproc=2", *bash(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 128 + signal.SIGINT, err)
        self.assertEqual(sorted(lines), ["[rank0]: ready\n", "[rank1]: ready\n"])
        self.assertEqual(
            sorted(out.splitlines()), ["[rank0]: got it", "[rank1]: got it"]
        )
        self.assertIn("stopped by SIGINT", err)

    def test_ranks_end_with_a_killed_launcher(self):
        process = subprocess.Popen(
            [RUN, "--nproc=2", *bash("echo $$; exec sleep 60")],
            stdout=subprocess.PIPE,
            text=True,
        )
        pids = [process.stdout.readline().split()[-1] for _ in range(2)]
        process.kill()
        process.wait()
        process.stdout.close()
        self.assertEqual(still_running(pids), [])


class Arguments(unittest.TestCase):
    def refuses(self, message, *arguments):
        result = run(*arguments)
        self.assertEqual(result.returncode, 2)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertIn(message, result.stderr)

    def test_wrong_ones_are_refused_in_one_line(self):
        self.refuses("no program given", "--nproc=2")
        self.refuses("--nproc=0: at least 1", "--nproc=0", "true")
        self.refuses("--nproc=two is not a number", "--nproc=two", "true")
        self.refuses("--timeout=-1: must be more than 0", "--timeout=-1", "true")
        self.refuses("unknown option --np", "--np=2", "true")
        self.refuses("--nproc needs a value", "--nproc")
        self.refuses("./missing: no such file", "./missing")
        self.refuses("not-a-program: not found on PATH", "not-a-program")
        self.refuses("./tools: not an executable", "./tools")

    def test_help(self):
        result = run("--help")
        self.assertEqual(result.returncode, 0)
        self.assertIn("tools/run --nproc=N", result.stdout)


if __name__ == "__main__":
    sys.exit(unittest.main())
