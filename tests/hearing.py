# SPDX-License-Identifier: Apache-2.0
"""What people are told, kept by a test instead of shown."""

from holdfast.runtime.observe import Details, Level


class Heard(list[str]):
    """A `Say`: the lines from INFO on, in order."""

    def __call__(self, text: str | Details, level: Level = Level.INFO, /) -> None:
        if level >= Level.INFO:
            self.append(str(text))
