#!/usr/bin/env python3
"""A rank is killed in the middle of a step: all ranks end, and the launcher says why.

Kills one of several real ranks that train through tools/run: while they compute and
communicate, while one sleeps in code of its own and the others wait for it.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

RUN = os.path.join("tools", "run")
TRAIN_GPT = os.path.join("examples", "train_gpt")
STALLING_TRAINER = os.path.join("tests", "tools", "stalling_trainer")

# The operation that a rank was in, as its error names it.
OPERATION = r"(all-gather|reduce-scatter|all-reduce) of "


def rank_pids(launcher):
    """{rank: process id} of the launcher's children."""
    pids = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            if parent != launcher:
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        for variable in environment:
            if variable.startswith(b"RANK="):
                pids[int(variable[5:])] = int(entry)
    return pids


class Training:
    """Ranks that train; what they and the launcher have written is in `lines`."""

    def __init__(self, nproc, *command):
        self.process = subprocess.Popen(
            [RUN, f"--nproc={nproc}", "--timeout=120", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def text(self):
        return "".join(list(self.lines))

    def wait_for(self, pattern, seconds=90):
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text(), re.MULTILINE):
            if time.monotonic() > end or self.process.poll() is not None:
                self.close()
                raise AssertionError(f"no line like {pattern}:\n{self.text()}")
            time.sleep(0.02)

    def kill(self, rank):
        """Seconds until all has ended."""
        pids = rank_pids(self.process.pid)
        start = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"still running after 60 s:\n{self.text()}") from None
        seconds = time.monotonic() - start
        self.reader.join(5)
        self.process.stdout.close()
        self.left = [p for p in pids.values() if os.path.exists(f"/proc/{p}")]
        return seconds

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()


class KilledRank(unittest.TestCase):
    def check(self, training, rank, stopped=()):
        """Kills the rank. The `stopped` don't notice and end by the launcher."""
        seconds = training.kill(rank)
        text = training.text()
        self.assertLess(seconds, 10, text)
        self.assertEqual(training.process.returncode, 128 + signal.SIGKILL, text)
        self.assertEqual(training.left, [], text)
        summary = [line for line in text.splitlines() if line.startswith("tools/run: ")]
        self.assertRegex(summary[0], rf"rank {rank} failed first: signal SIGKILL after", text)
        for other in stopped:
            self.assertRegex(summary[0], rf"\b{other}\b.* stopped", text)
        return summary

    def check_operation(self, summary, text):
        """The launcher quotes survivors, and each one names what it was in."""
        quoted = [
            line
            for line in summary[1:]
            if re.search(r"rank \d+ (failed after it|before it was stopped): ", line)
        ]
        self.assertTrue(quoted, text)
        for line in quoted:
            self.assertRegex(line, OPERATION, text)

    def train_gpt(self, nproc, killed):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("A line of a text to learn.\n" * 200)
            file.flush()
            training = Training(
                nproc, TRAIN_GPT, f"--data={file.name}", "--steps=100000", "--batch=2",
                "--seq=24", "--layers=2", "--dim=36", "--heads=3", "--log_every=1",
                "--losses=",
            )  # fmt: skip
            training.wait_for(r"^\[rank0\]: step +3/")
            self.check_operation(self.check(training, killed), training.text())

    def test_train_gpt_on_2_ranks(self):
        self.train_gpt(2, killed=1)

    def test_train_gpt_on_2_ranks_the_one_with_the_store(self):
        self.train_gpt(2, killed=0)

    def test_train_gpt_on_4_ranks(self):
        self.train_gpt(4, killed=2)

    def stalled(self, nproc, sleeper):
        """Ranks that wait for one that sleeps in a forward of its own."""
        training = Training(nproc, STALLING_TRAINER, str(sleeper))
        training.wait_for(rf"^\[rank{sleeper}\]: asleep")
        for rank in range(nproc):
            training.wait_for(rf"^\[rank{rank}\]: step 2$")
        time.sleep(0.5)  # into the third step
        return training

    def test_the_sleeper_while_the_others_are_in_a_collective(self):
        training = self.stalled(3, sleeper=1)
        self.check_operation(self.check(training, 1), training.text())

    def test_one_in_a_collective_while_another_sleeps(self):
        # Rank 0 waits for rank 1 and so does not notice what happens to rank 2.
        self.check(self.stalled(3, sleeper=1), 2, stopped=[0, 1])

    def test_the_only_one_that_is_awake(self):
        self.check(self.stalled(2, sleeper=0), 1, stopped=[0])


if __name__ == "__main__":
    sys.exit(unittest.main())
