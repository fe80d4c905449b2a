# SPDX-License-Identifier: Apache-2.0
"""DLRover's import names on Holdfast. Every module maps to Holdfast's own classes; a missing name
is refused in one sentence that names docs/from-dlrover.md."""

from dlrover import _refused

_refused.refuse_beside_the_real_one()
_refused.install()
