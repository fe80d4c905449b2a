# SPDX-License-Identifier: Apache-2.0
"""How TensorFlow's roles find each other: TF_CONFIG."""

import json

from holdfast.model.order import Order

PORTS = {"ps": 2222}
PORT = 3333
"""Where TensorFlow's roles listen, by the prior art's convention."""


def service_name(job: str, role: str, rank: int) -> str:
    """The name of the address that a rank keeps over all its nodes."""
    return f"{job}-edljob-{role}-{rank}"


def port_of(role: str) -> int:
    return PORTS.get(role, PORT)


def tf_config(job: str, namespace: str, sizes: dict[str, int], order: Order) -> str:
    """The address of every node, and which one this is. TensorFlow wants no evaluators in it."""
    cluster = {
        role: [
            f"{service_name(job, role, rank)}.{namespace}.svc:{port_of(role)}"
            for rank in range(max(size, order.node_rank + 1 if role == order.role else 0))
        ]
        for role, size in sizes.items()
        if role != "evaluator" and size > 0
    }
    task = {"type": order.role, "index": order.node_rank}
    return json.dumps({"cluster": cluster, "task": task})
