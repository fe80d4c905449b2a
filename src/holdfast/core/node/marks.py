# SPDX-License-Identifier: Apache-2.0
"""Marks on their way from a rank to the master.

A mark says how far a rank was in its data when it saved. It is cumulative per lease, but a lease
that has ended is named only once. So what has not been confirmed is said again with the next save,
at every station of the way: a save that failed, or that some rank never made, loses nothing.
"""

from collections.abc import Iterable

from holdfast.protocol.data import Consumed, Mark

Marks = tuple[Mark, ...]


def merged(words: Iterable[Marks]) -> Marks:
    """All marks of one rank, given oldest first, as one: for every lease the last one counts."""
    terms: dict[str, int] = {}
    leases: dict[str, dict[int, Consumed]] = {}
    for mark in (mark for marks in words for mark in marks):
        if mark.name not in terms or mark.term > terms[mark.name]:
            # The position has jumped: what was said of leases before is worth nothing.
            terms[mark.name], leases[mark.name] = mark.term, {}
        if mark.term == terms[mark.name]:
            leases[mark.name].update((consumed.lease, consumed) for consumed in mark.consumed)
    return tuple(Mark(name, terms[name], tuple(of.values())) for name, of in leases.items())
