# SPDX-License-Identifier: Apache-2.0
"""The master process: it drives the job core, and keeps nothing that the journal does not."""
