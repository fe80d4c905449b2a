# SPDX-License-Identifier: Apache-2.0
"""Holds modules only."""
