# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: events in; facts, records and commands out. No clock, no IO, no randomness."""
