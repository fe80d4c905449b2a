# SPDX-License-Identifier: Apache-2.0
"""Training in worlds that change: the store that no rank hosts, and a fixed global batch."""
