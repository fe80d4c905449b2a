# SPDX-License-Identifier: Apache-2.0
"""What the master decides. Begin with flow.py, the map of events."""
