# SPDX-License-Identifier: Apache-2.0
"""What a second of a job can be spent on: exactly one of these."""

import enum


class Use(enum.StrEnum):
    """One use of the job's time. Goodput is the productive share."""

    PRODUCTIVE = "productive"
    CHECKPOINT = "checkpoint"
    """Steps stood still while state was saved."""
    DETECT = "detect"
    """From the last finished step to the moment when the failure was noticed."""
    RENDEZVOUS = "rendezvous"
    """From the verdict to the agreement on the next world."""
    RESTART = "restart"
    """From the agreement until every worker process runs."""
    START = "start"
    """From running processes to the first step that the job ever finished."""
    RESTORE = "restore"
    """From running processes to the first finished step, after an incident."""
    LOST = "lost"
    """Work that had to be done again."""
    IDLE = "idle"
    """Waiting for nodes, or after the end."""
