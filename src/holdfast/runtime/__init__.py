# SPDX-License-Identifier: Apache-2.0
"""What every process of Holdfast shares: the driver around a core, and its ties to the world."""
