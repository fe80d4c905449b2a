# SPDX-License-Identifier: Apache-2.0
"""Where nodes come from. Platforms do not know each other."""
