# SPDX-License-Identifier: Apache-2.0
"""The `holdfast` command: one file per subcommand."""

import argparse
import functools
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from holdfast import __version__
from holdfast.model.errors import HoldfastError, UsageError
from holdfast.runtime.signals import ignore_notices

EXIT_FAILED = 1
EXIT_USAGE = 2

_COMMANDS = ("master", "status", "ckpt", "data", "demo", "sim", "operator", "k8s")
"""Those with a file of the same name and a parser; `holdfast --help` lists them in this order."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 when the job failed, 2 for a mistake of the user."""
    ignore_notices()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ending_at_ctrl_c():
            command = _find(words)
        return command()
    except UsageError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except HoldfastError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """Until a command begins, Ctrl-C just ends the process; from then on it is an exception.

    An exception within an import may be swallowed, and nothing needs an end in order yet. A script
    starts what it puts into the background with SIGINT ignored: whoever sends it then means it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _find(words: list[str]) -> Callable[[], int]:
    """The command that is meant, with what it was given."""
    # `run` has torchrun's grammar, in which everything after the script belongs to the script.
    if words[:1] == ["run"]:
        from holdfast.cli import run

        return functools.partial(run.main, words[1:])
    if words[:1] == ["dlrover-run"]:
        from holdfast.cli import dlrover_run, run

        return functools.partial(run.main, words[1:], dlrover_run.parse_dlrover_run)
    if words[:1] == ["node"]:
        from holdfast.cli import node

        return functools.partial(node.main, words[1:])
    parser = _Parser(
        prog="holdfast",
        description="Keep distributed training running.",
        epilog="`holdfast COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("run", help="train: torchrun's flags, and a job that survives failures")
    # Only what is meant is imported: a master that is started again must be there soon.
    for name in words[:1] if words and words[0] in _COMMANDS else _COMMANDS:
        importlib.import_module(f"holdfast.cli.{name}").add_parser(commands)
    arguments = parser.parse_args(words)
    return functools.partial(arguments.run, arguments)
