# SPDX-License-Identifier: Apache-2.0
"""Nodes that run the user's program without an agent: parameter servers and their clients.

Owns their table, which is apart from that of the nodes with agents, and the rules of each role.
"""
