# SPDX-License-Identifier: Apache-2.0
"""What the master remembers of each entity, and which entities a fact is about."""

from holdfast.core.job import events as ev
from holdfast.master.history import ENTITIES_MAX, STORIES_MAX, History, entities_of
from holdfast.master.stories import dataset_of
from holdfast.protocol.messages import Story


def story(number: int) -> Story:
    return Story(float(number), "Kind", f"text {number}", {})


def test_each_entity_has_its_own_stories_oldest_first() -> None:
    history = History()
    history.add(["node/3", "round/1"], story(1))
    history.add(["node/3"], story(2))
    assert history.of("node/3") == (story(1), story(2))
    assert history.of("round/1") == (story(1),)
    assert history.of("node/4") == ()
    assert history.entities() == ("node/3", "round/1")


def test_the_newest_stories_of_an_entity_are_kept() -> None:
    history = History()
    for number in range(STORIES_MAX + 5):
        history.add(["node/0"], story(number))
    kept = history.of("node/0")
    assert (len(kept), kept[0], kept[-1]) == (STORIES_MAX, story(5), story(STORIES_MAX + 4))


def test_the_entity_that_was_quiet_longest_is_forgotten() -> None:
    history = History()
    for number in range(ENTITIES_MAX):
        history.add([f"step/{number}"], story(number))
    history.add(["step/0"], story(0))
    history.add(["node/0"], story(1))
    assert history.of("step/1") == ()
    assert len(history.of("step/0")) == 2
    assert len(history.entities()) == ENTITIES_MAX


def test_a_story_is_filed_under_all_that_it_is_about() -> None:
    fields: dict[str, str | int | float] = {"node_rank": 3, "round": 7, "step": 100}
    assert entities_of(fields, "node/3", "") == ["node/3", "round/7", "step/100"]
    assert entities_of({}, "", "train") == ["dataset/train"]
    assert entities_of({}, "", "") == []


def test_facts_of_datasets_say_which() -> None:
    assert dataset_of(ev.EpochOver("train", 0, 2)) == "train"
    assert dataset_of(ev.HeardAgain(ev.NodeId(0), 1.0)) == ""
