# SPDX-License-Identifier: Apache-2.0
"""`holdfast completion SHELL`: the shell code that completes commands, options and paths."""

import argparse
from collections.abc import Iterator

import shtab

from holdfast.cli import COMMANDS, build_parser
from holdfast.cli.parser import subcommands

SHELLS = ("bash", "zsh", "fish", "tcsh")

_PATHS = {"FILE": shtab.FILE, "PATH": shtab.FILE, "DIR": shtab.DIRECTORY}
"""The kind of path, by the metavar in the help."""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "completion",
        help=summary,
        description="Print a script that lets the shell complete commands, options and paths. It "
        "holds them as they are in this version: make it again after an upgrade.",
        examples=(
            'eval "$(holdfast completion bash)"',
            "holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast",
            "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
        ),
        allow_abbrev=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    parser = build_parser(tuple(COMMANDS))
    for action in _all_actions(parser):
        if action.dest == "script" or action.metavar in _PATHS:
            # shtab reads the kind of a value from this attribute.
            path = _PATHS.get(str(action.metavar), shtab.FILE)
            setattr(action, "complete", path)  # noqa: B010
    print(shtab.complete(parser, arguments.shell))
    return 0


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for command in subcommands(parser).values():
        yield from _all_actions(command)
