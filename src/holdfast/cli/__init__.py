# SPDX-License-Identifier: Apache-2.0
"""The `holdfast` command: one file per subcommand."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from holdfast import __version__
from holdfast.model.errors import HoldfastError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 when the job failed, 2 for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UsageError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except HoldfastError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    # `run` has torchrun's grammar, in which everything after the script belongs to the script.
    if words[:1] == ["run"]:
        from holdfast.cli import run

        return run.main(words[1:])
    if words[:1] == ["node"]:
        from holdfast.cli import node

        return node.main(words[1:])
    from holdfast.cli import ckpt, data, demo, master, status

    parser = _Parser(
        prog="holdfast",
        description="Keep distributed training running.",
        epilog="`holdfast COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("run", help="train: torchrun's flags, and a job that survives failures")
    for command in (master, status, ckpt, data, demo):
        command.add_parser(commands)
    arguments = parser.parse_args(words)
    code: int = arguments.run(arguments)
    return code
