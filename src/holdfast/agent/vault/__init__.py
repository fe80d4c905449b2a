# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one node: `vault.py` is the whole, the others are its parts."""
