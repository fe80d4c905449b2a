# SPDX-License-Identifier: Apache-2.0
"""Whether the workers make progress, and what follows if they do not.

Owns the watch for hangs, the budgets of failures, and the end of the job: every failure becomes
another round or the end here.
"""
