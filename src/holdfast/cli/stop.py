# SPDX-License-Identifier: Apache-2.0
"""`holdfast stop`: end a job for good, in order."""

import argparse
import asyncio
import getpass
import os
import socket

import uvloop

from holdfast.cli import asking
from holdfast.cli.words import duration, plain
from holdfast.protocol import messages as m


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "stop",
        help=summary,
        description="End a job for good. Its workers get SIGTERM and their grace, what is in "
        "memory goes to storage, and the command returns when every node has done so. Without "
        "options it ends the only job that runs on this machine. A job that shall go on later is "
        "stopped by Ctrl-C or SIGTERM to `holdfast run --state DIR` instead.",
        epilog="Exit codes: 0 the job has ended, 1 the master cannot be reached, is gone while the "
        "job may still be saving, or has not heard from every node that it saved, 2 usage.",
        examples=(
            "holdfast stop",
            "holdfast stop --job bert --reason 'the loss went up'",
            "holdfast stop --master 10.0.0.5:7070 --token-file /shared/bert/token",
        ),
        allow_abbrev=False,
    )
    asking.add_arguments(parser)
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="why, for the log and for `holdfast status`"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    target = asking.target_of(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asking.end(target, arguments.timeout, _why(arguments.reason), _tell))
    print("the job has ended")
    return 0


def _why(reason: str) -> str:
    """The reason with the user's name: people ask the master first who ended the job."""
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # A user without a name, as in many containers.
        who = str(os.getuid())
    text = f"{who} on {socket.gethostname()} ended it with `holdfast stop`"
    # Every terminal and log of the job will show it.
    return f"{text}: {plain(reason)}" if reason else text


def _tell(story: m.Story) -> None:
    print(f"{duration(story.at_s):>12}  {plain(story.text)}", flush=True)
