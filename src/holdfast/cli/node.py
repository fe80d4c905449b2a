# SPDX-License-Identifier: Apache-2.0
"""`holdfast node LAUNCH.json`: one agent, as the local platform starts it. Not for people."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from holdfast.agent.agent import AgentEnd
from holdfast.cli.agent_side import own_log, run_agent
from holdfast.cli.console import Console
from holdfast.cli.run_options import RunOptions
from holdfast.runtime.observe import Level, Say, sayer
from holdfast.runtime.settings import node_settings
from holdfast.runtime.signals import EndSignals


def main(argv: Sequence[str]) -> int:
    """Run the agent that the launch file describes; its identity is in the environment."""
    options = msgspec.json.decode(
        Path(argv[0]).read_bytes(), type=RunOptions, dec_hook=lambda kind, text: kind(text)
    )
    node = node_settings()
    # Below the launcher's folder, which is removed, or kept, as a whole.
    folder = Path(argv[0]).parent / f"node-{node.node_id}"
    folder.mkdir(mode=0o700, exist_ok=True)
    console = Console()
    name = f"node {node.node_id}"

    async def run(say: Say) -> AgentEnd:
        signals = EndSignals(options.signals_to_handle)
        return await run_agent(
            options, folder, node=node, console=console, say=say, signals=signals
        )

    try:
        with own_log(options, folder, f"node-{node.node_id}.log") as log:
            say = sayer(name, console.err, least=options.log_level, file=log)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                end = runner.run(run(say))
                say(f"ends with {end.exit_code}: {end.reason}", Level.DEBUG)
    finally:
        console.close()
    return end.exit_code
