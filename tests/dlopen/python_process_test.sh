#!/usr/bin/env bash
# Runs python_process_test.py with the Python whose torch the library is linked with.
set -euo pipefail

: "${COMPOSABLE_PYTHON:?run tools/bootstrap, which sets up a Python with PyTorch}"
exec "${COMPOSABLE_PYTHON}" tests/dlopen/python_process_test.py
