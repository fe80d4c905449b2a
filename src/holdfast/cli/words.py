# SPDX-License-Identifier: Apache-2.0
"""Numbers and foreign text, as the commands print them."""


def count(number: int, noun: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in the words of people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def speed(per_s: float) -> str:
    """Steps per second; for slow ones, seconds per step."""
    return f"{per_s:.1f} steps/s" if per_s >= 1 else f"{1 / per_s:.1f} s/step"


def plain(text: str) -> str:
    """Foreign text on one line and without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)
