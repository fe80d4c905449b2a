# SPDX-License-Identifier: Apache-2.0
"""Two ranks count together through the master; in round 1 one of them then fails."""

import sys

from steplog import RANK, ROUND, meet, note

from holdfast.client import barrier, kv_add, kv_get

note("main")
for _ in range(2 if ROUND == 1 else 1):
    note("added", kv_add("count", 1))
barrier("all have counted", 2)
note("total", int(kv_get("count")))
meet("totals")
if ROUND == 1:
    if RANK == 1:
        sys.exit(1)
    kv_get("what nobody sets")
