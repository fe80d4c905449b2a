# SPDX-License-Identifier: Apache-2.0
"""Nodes as agent processes on this machine: for one computer, for development and for tests."""

from holdfast.platforms.local.platform import LocalPlatform

__all__ = ["LocalPlatform"]
