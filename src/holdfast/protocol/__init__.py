# SPDX-License-Identifier: Apache-2.0
"""The one wire definition: every message between workers, agents, observers and the master."""
