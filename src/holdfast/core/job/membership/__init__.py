# SPDX-License-Identifier: Apache-2.0
"""Who is part of the job: one row per node with an agent, from its order to its end.

Owns admission and incarnations, phases, liveness and leases, orders and relaunches, and what people
ask of the size of a managed job. Other subsystems learn of nodes by facts: NodeReady, NodeAbsent,
NodeLost, LeaseExpired.
"""
