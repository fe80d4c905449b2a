# SPDX-License-Identifier: Apache-2.0
"""`holdfast operator`: makes and keeps the masters of ElasticJobs in a Kubernetes cluster."""

import argparse
import asyncio
import secrets
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from holdfast.model.errors import UsageError
from holdfast.runtime.observe import sayer
from holdfast.runtime.signals import on_end_signals


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "operator",
        help=summary,
        description="Make the master of each ElasticJob, and make it again when it is lost. "
        "Several operators may run: one acts, the others stand by.",
        examples=(
            "holdfast operator --namespace training",
            "holdfast operator --kubeconfig ~/.kube/config",
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="look after the jobs of this namespace only; may be given several times "
        "(default: all namespaces)",
    )
    parser.add_argument(
        "--master-image",
        default="",
        metavar="IMAGE",
        help="image of the masters of all jobs that do not say spec.masterImage (default: the "
        "image of the master's template, else that of the workers)",
    )
    parser.add_argument(
        "--lease-namespace",
        default="",
        metavar="NAME",
        help="where operators agree on which of them acts (default: the namespace of this pod)",
    )
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="how to reach the cluster from outside"
    )
    parser.add_argument("--context", default="", metavar="NAME", help="a context of that file")
    parser.add_argument(
        "--http",
        default="",
        metavar="HOST:PORT",
        help="answer /healthz and /readyz there, for the probes of Kubernetes (default: nowhere)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(arguments))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal: then the lease is released, and another operator acts at once."""
    try:
        from holdfast.platforms.kubernetes.api import Api
        from holdfast.platforms.kubernetes.config import Access
        from holdfast.platforms.kubernetes.operator.health import Health
        from holdfast.platforms.kubernetes.operator.leader import Leadership
        from holdfast.platforms.kubernetes.operator.process import Operator
        from holdfast.runtime.http import HttpServer
    except ModuleNotFoundError as exc:
        raise UsageError(f"{exc}: install holdfast[kubernetes]") from exc
    say = sayer("operator")
    access = Access.find(arguments.kubeconfig, arguments.context)
    api = Api(access)
    me = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    leadership = Leadership(api, arguments.lease_namespace or access.namespace, me, say=say)
    health = Health(leadership)

    async def act() -> None:
        health.operator = Operator(
            api,
            namespaces=arguments.namespace,
            default_image=arguments.master_image,
            say=say,
        )
        await health.operator.run()

    async with AsyncExitStack() as open_things:
        open_things.push_async_callback(api.close)
        if arguments.http:
            http = await HttpServer.start(arguments.http, health.application())
            open_things.push_async_callback(http.close)
            say(f"answers /healthz and /readyz on {http.address}")
        holding = asyncio.create_task(leadership.hold(act))

        def end(number: signal.Signals) -> None:
            say(f"stopped by {number.name}")
            holding.cancel()

        on_end_signals(end)
        await asyncio.wait({holding})
        if not holding.cancelled():
            holding.result()
