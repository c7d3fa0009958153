"""Entry point of `preempt-harness`: finds the subcommand and hands over.

Owns the table of subcommands. A subcommand is a module with `add_arguments(parser)` and
`run(arguments) -> int` (the exit status). Only the module that is called is imported, so that help
loads no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from preempt_harness.errors import HarnessError

EXIT_USAGE = 2


class Subcommand(NamedTuple):
    """Where a subcommand lives, and its line in the help."""

    module: str
    summary: str


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "stress": Subcommand("preempt_harness.cli.stress", "run random requests in a pool too small"),
    "check": Subcommand("preempt_harness.cli.check", "apply all checks to a recorded trial"),
    "replay": Subcommand("preempt_harness.cli.replay", "run a trial again and judge it"),
    "calibrate": Subcommand("preempt_harness.cli.calibrate", "measure how far float noise goes"),
    "adapters": Subcommand("preempt_harness.cli.adapters", "list engines and what each can do"),
    "audit": Subcommand("preempt_harness.cli.audit", "plant known bugs, and say who finds them"),
    "matrix": Subcommand("preempt_harness.cli.matrix", "list the cells of the ini file's matrix"),
    "fetch": Subcommand("preempt_harness.cli.fetch", "make a model's checkpoint, print its path"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        Exit status: the subcommand's, or 2 for an error that the user can mend (argparse exits
        with 2 as well).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, subparsers = _parser()
    if given and given[0] in SUBCOMMANDS:
        module = importlib.import_module(SUBCOMMANDS[given[0]].module)
        module.add_arguments(subparsers[given[0]])
        parsed = parser.parse_args(given)
        try:
            status: int = module.run(parsed)
        except _user_errors() as error:
            print(f"preempt-harness {given[0]}: {error}", file=sys.stderr)
            return EXIT_USAGE
        return status
    parser.parse_args(given)  # exits: help, an unknown subcommand, or none
    raise AssertionError("argparse accepted arguments without a subcommand")


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors that say what to do; only asked for when something was raised."""
    from preempt_engine.errors import EngineError

    return HarnessError, EngineError


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="preempt-harness",
        description="Finds the bugs that LLM inference engines have under preemption.",
    )
    added = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    return parser, {
        name: added.add_parser(name, help=subcommand.summary, description=subcommand.summary)
        for name, subcommand in SUBCOMMANDS.items()
    }
