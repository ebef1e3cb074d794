"""The library loaded into a process that already runs Python's torch.

Started by python_process_test.sh with the Python that has the same torch.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

import torch  # before the library, as the point of the test is

LIBRARY = os.path.join(os.getcwd(), "tests", "dlopen", "libtrain_step.so")


class StepReport(ctypes.Structure):
    _fields_ = [
        ("sharded_before", ctypes.c_double),
        ("sharded_after", ctypes.c_double),
        ("plain_before", ctypes.c_double),
        ("plain_after", ctypes.c_double),
        ("same_weights", ctypes.c_int64),
        ("sharded_elements", ctypes.c_int64),
        ("plain_elements", ctypes.c_int64),
    ]


class TrainError(Exception):
    pass


def load(path=LIBRARY, loader=ctypes.CDLL):
    """The library; calls of a CDLL release the GIL, those of a PyDLL do not."""
    library = loader(path)
    library.TrainStep.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(StepReport),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.EngineType.restype = ctypes.c_char_p
    return library


def train_step(library, world_size):
    report = StepReport()
    error = ctypes.create_string_buffer(4096)
    if library.TrainStep(world_size, report, error, len(error)) != 0:
        raise TrainError(error.value.decode())
    return report


class Double(torch.autograd.Function):
    """An operator whose backward is Python."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def python_backward():
    """A backward that runs Python code: the gradient, and what a hook saw."""
    seen = []
    x = torch.arange(3.0, requires_grad=True)
    x.register_hook(seen.append)
    (Double.apply(x) ** 2).sum().backward()
    return x.grad, seen


class PythonProcessTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        python_backward()  # Python's engine is at work before the library is there
        cls.library = load()

    def check_python(self):
        grad, seen = python_backward()
        self.assertEqual(grad.tolist(), [0.0, 8.0, 16.0])
        self.assertEqual([s.tolist() for s in seen], [grad.tolist()])

    def check_step(self, world_size):
        report = train_step(self.library, world_size)
        self.assertEqual(report.sharded_before, report.plain_before)
        self.assertEqual(report.sharded_after, report.plain_after)
        self.assertEqual(report.same_weights, 1)
        self.assertLess(report.sharded_after, report.sharded_before)
        self.assertLess(abs(report.sharded_elements * world_size - report.plain_elements),
                        0.2 * report.plain_elements)

    def test_one_rank_trains_in_the_calling_thread(self):
        self.check_step(1)
        self.check_python()

    def test_two_ranks_train_in_threads_of_their_own(self):
        self.check_step(2)
        self.check_python()

    def test_the_engine_stays_pythons(self):
        self.check_step(1)
        self.assertIn(b"PythonEngine", self.library.EngineType())

    def test_python_trains_meanwhile(self):
        stop = threading.Event()
        rounds = []

        def work():
            while not stop.is_set():
                rounds.append(python_backward()[0].tolist())

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for world_size in (2, 1, 2):
                before = len(rounds)
                self.check_step(world_size)
                self.assertGreater(len(rounds), before)  # the GIL was free
        finally:
            stop.set()
            worker.join()
        self.assertEqual(rounds, [[0.0, 8.0, 16.0]] * len(rounds))

    def test_with_the_gil_held_a_backward_is_refused(self):
        holds_gil = load(loader=ctypes.PyDLL)
        with self.assertRaisesRegex(TrainError, "autograd engine was called while holding the GIL"):
            train_step(holds_gil, 1)
        self.check_step(1)
        self.check_python()

    def test_torch_is_there_once(self):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = set(re.findall(r"/\S*/libtorch_cpu\.so\S*", maps.read()))
        wheel = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        self.assertEqual({os.path.realpath(l) for l in loaded}, {os.path.realpath(wheel)})

    def test_loading_it_again_changes_nothing(self):
        load()
        self.check_step(1)

    def test_a_second_copy_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(LIBRARY, os.path.join(folder, "libcopy.so"))
            second = load(copy)
        for _ in range(2):
            with self.assertRaisesRegex(
                    TrainError, "fully_shard: .*DispatchKey::DeferredInit.*second copy of this "
                    "library.*[Ll]oad only one"):
                train_step(second, 1)
        self.check_step(2)
        self.check_python()

    def test_a_later_user_of_the_key_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "multiple backend fallbacks.*DeferredInit"):
            torch.library.Library("_", "IMPL").fallback(lambda *_: None, "DeferredInit")
        self.check_step(1)

    def test_an_earlier_user_of_the_key_is_named(self):
        code = """
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "DeferredInit")
import python_process_test as test
try:
    test.train_step(test.load(), 1)
except test.TrainError as error:
    print(error)
"""
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))},
            capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, "fully_shard: .*DispatchKey::DeferredInit.*torchdistX.*"
                         "LibTorch says: Tried to register multiple backend fallbacks")


if __name__ == "__main__":
    unittest.main(verbosity=2)
