# SPDX-License-Identifier: Apache-2.0
"""The error that ends one worker often ends all of them: the console shows it once."""

ERROR_STARTS = (b"Traceback (most recent call last):", b"usage: ", b'  File "', b"holdfast: ")
"""How the last text of a program begins: an exception, wrong arguments, a syntax error, or what
holdfast.worker says in its place."""


class Repeats:
    """The last errors of the workers of one round on one node."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, list[int]] = {}

    def is_new(self, text: bytes, rank: int) -> bool:
        """Whether no other rank has ended with this text yet."""
        ranks = self._ranks.setdefault(text, [])
        ranks.append(rank)
        return len(ranks) == 1

    def tell(self) -> list[str]:
        """The errors that were left out, once every worker has ended."""
        told = [
            f"[rank{first}] the same error ended {_named(others)}"
            for first, *others in self._ranks.values()
            if others
        ]
        self._ranks.clear()
        return told


def _named(ranks: list[int]) -> str:
    if len(ranks) > 4:
        return f"{len(ranks)} more ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
