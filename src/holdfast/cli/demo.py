# SPDX-License-Identifier: Apache-2.0
"""`holdfast demo`: a job on this machine that is killed three times and does not mind."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser("demo", help="watch a small job survive three kills")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    raise NotImplementedError
