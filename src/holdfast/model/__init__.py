# SPDX-License-Identifier: Apache-2.0
"""The nouns of Holdfast: frozen values without behaviour that touches the world."""
