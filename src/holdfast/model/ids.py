# SPDX-License-Identifier: Apache-2.0
"""Identities that must never be mixed up, as distinct types.

A *node id* is new at every launch; a *node rank* is the logical slot that a replacement inherits;
an *incarnation* numbers the agent processes the master has met, so that the newer of two wins;
a *generation* rises with every round and every master and fences whatever is older.
"""

from typing import NewType

NodeId = NewType("NodeId", int)
NodeRank = NewType("NodeRank", int)
Incarnation = NewType("Incarnation", int)
Round = NewType("Round", int)
Generation = NewType("Generation", int)
