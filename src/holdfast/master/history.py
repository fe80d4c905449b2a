# SPDX-License-Identifier: Apache-2.0
"""What happened to one node, round, step or dataset: the sentences that people were told of it.

For the question after a failure: not what the job does now, but what this node has been through.
It is in the memory of this master only; the journal has what the next one needs, and no sentences.
"""

from collections.abc import Iterable, Mapping

from holdfast.protocol.messages import Story

STORIES_MAX = 100
"""The newest of each entity are kept."""
ENTITIES_MAX = 20_000
"""The entity of which nothing was told for longest is forgotten first: steps and rounds come and
go, and a job may run for months."""


class History:
    """The newest stories of each entity."""

    def __init__(self) -> None:
        #: The entity that was told of last is last.
        #: Lists, as most are short: an empty deque takes 600 bytes, and a job has 10,000 nodes.
        self._stories: dict[str, list[Story]] = {}

    def add(self, entities: Iterable[str], story: Story) -> None:
        for entity in entities:
            stories = self._stories.pop(entity, None) or []
            stories.append(story)
            if len(stories) > STORIES_MAX:
                del stories[0]
            self._stories[entity] = stories
        while len(self._stories) > ENTITIES_MAX:
            del self._stories[next(iter(self._stories))]

    def of(self, entity: str) -> tuple[Story, ...]:
        """Oldest first; empty if nothing was told of it."""
        return tuple(self._stories.get(entity, ()))

    def entities(self) -> tuple[str, ...]:
        """Everything that was told of, the newest first."""
        return tuple(reversed(self._stories))


def entities_of(fields: Mapping[str, str | int | float], node: str, name: str) -> list[str]:
    """What a story is about: its node as people call it, its round, its step and its dataset."""
    found = [node] if node else []
    found += [f"{key}/{fields[key]}" for key in ("round", "step") if key in fields]
    return [*found, f"dataset/{name}"] if name else found
