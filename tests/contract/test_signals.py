# SPDX-License-Identifier: Apache-2.0
"""Which signals end a program."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, signal
from holdfast.runtime.signals import on_end_signals

async def main():
    ended = asyncio.Event()
    on_end_signals(lambda number: (print(number.name, flush=True), ended.set()), [signal.SIGUSR1])
    print("ready", flush=True)
    await asyncio.wait_for(ended.wait(), 60)

asyncio.run(main())
"""
WAIT_S = 120.0


def run(*starter: str) -> "subprocess.Popen[str]":
    command = [*starter, sys.executable, "-c", PROGRAM]
    # The tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=str
)
def test_these_end_it(number: signal.Signals) -> None:
    with run() as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.communicate(timeout=WAIT_S)[0] == f"{number.name}\n"


def test_a_program_under_nohup_outlives_its_terminal() -> None:
    with run("nohup") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGTERM)
        assert program.communicate(timeout=WAIT_S)[0] == "SIGTERM\n"
