"""`preempt-harness fetch MODEL`: makes a checkpoint before tests need it, and prints its path."""

from __future__ import annotations

import argparse

from preempt_harness.checkpoints import resolve_model_name
from preempt_harness.checkpoints.names import MODEL_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", choices=MODEL_NAMES, metavar="MODEL", help=", ".join(MODEL_NAMES))


def run(arguments: argparse.Namespace) -> int:
    """Make the checkpoint if it is not there; print its path."""
    print(resolve_model_name(arguments.model))
    return 0
