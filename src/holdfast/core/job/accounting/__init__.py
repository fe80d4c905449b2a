# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: steps, incidents, goodput, and the checkpoints in numbers.

Owns the account of the job's seconds and the list of incidents. Nothing here decides anything.
"""
