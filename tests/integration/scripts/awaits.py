# SPDX-License-Identifier: Apache-2.0
"""Rank 0 counts and then waits for a key, which the others set when the test says so."""

from steplog import RANK, is_to_finish, note, pause

from holdfast.client import kv_add, kv_get, kv_set

note("main")
if RANK == 0:
    for _ in range(5):
        note("added", kv_add("count", 1))
    note("awaits")
    note("got", int(kv_get("go")))
    note("added", kv_add("count", 1))
else:
    while not is_to_finish():
        pause()
    kv_set("go", b"7")
