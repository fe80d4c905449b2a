# SPDX-License-Identifier: Apache-2.0
"""Amounts of cpu and memory as Kubernetes writes them: "8", 0.5, "500m", "16Gi", "1e3"."""

import re
from decimal import ROUND_CEILING, Decimal

_FORM = re.compile(
    r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)|)", re.ASCII
)
_FACTORS: dict[str, Decimal] = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{letter: Decimal(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}


def amount(value: object) -> Decimal | None:
    """The plain number; None if the value is not an amount."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    form = _FORM.fullmatch(str(value).strip())
    if form is None:
        return None
    digits, exponent, suffix = form.groups()
    return Decimal(digits + (exponent or "")) * _FACTORS[suffix or ""]


def milli(value: object) -> int | None:
    """Thousandths, e.g. of a core; rounded up, as in Kubernetes."""
    return _whole(value, Decimal("1e-3"))


def mib(value: object) -> int | None:
    """Memory in MiB, rounded up."""
    return _whole(value, Decimal(1 << 20))


def whole(value: object) -> int | None:
    """A count, e.g. of devices."""
    return _whole(value, Decimal(1))


def _whole(value: object, unit: Decimal) -> int | None:
    number = amount(value)
    if number is None or number < 0:
        return None
    return int((number / unit).to_integral_value(ROUND_CEILING))
