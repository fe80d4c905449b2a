# SPDX-License-Identifier: Apache-2.0
"""What a training process imports. Light: no torch, no thread, no event loop."""

from holdfast.client.connection import AgentClient, current
from holdfast.client.progress import barrier, kv_add, kv_get, kv_set, report_step

__all__ = ["AgentClient", "barrier", "current", "kv_add", "kv_get", "kv_set", "report_step"]
