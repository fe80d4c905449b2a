# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as bytes: memory slots, storage and transfer. Nothing in here knows torch."""
