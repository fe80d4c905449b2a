# SPDX-License-Identifier: Apache-2.0
"""Workers with children of their own: the step of a "grandchild" event is its process id."""

import subprocess

from steplog import note

FOREVER = ["sleep", "1000"]

for leaves_the_group in (False, True):
    child = subprocess.Popen(FOREVER, start_new_session=leaves_the_group)
    note("grandchild", child.pid)

import steps  # noqa: E402, F401
