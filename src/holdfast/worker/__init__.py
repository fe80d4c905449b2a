# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside the user's process, or just before it becomes the user's process.

Standard library only: whatever is imported here, the user's program pays for at every start.
"""
