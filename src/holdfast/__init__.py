# SPDX-License-Identifier: Apache-2.0
"""Holdfast keeps distributed training running: an elastic, fault-tolerant control plane."""

__version__ = "0.1.0"
