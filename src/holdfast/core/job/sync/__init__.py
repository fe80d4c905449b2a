# SPDX-License-Identifier: Apache-2.0
"""Keys, queues and barriers that workers share, each in the scope of a round or of the job.

Owns the scopes with all that is in them, and the requests that wait for a key, an element of a
queue, or the last member of a barrier.
"""
