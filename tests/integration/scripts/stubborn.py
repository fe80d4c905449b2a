# SPDX-License-Identifier: Apache-2.0
"""A worker that cannot be ended politely."""

import signal

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)

import steps  # noqa: E402, F401
