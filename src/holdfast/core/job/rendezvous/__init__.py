# SPDX-License-Identifier: Apache-2.0
"""Worlds: which nodes train together, in which order, and when that changes.

Owns the present world, its round, the nodes that stand ready for the next, and which older worlds
may still compute. It knows nodes by what membership says of them.
"""
