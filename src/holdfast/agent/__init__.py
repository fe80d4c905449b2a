# SPDX-License-Identifier: Apache-2.0
"""The node agent: starts, watches and ends the workers of one node."""
