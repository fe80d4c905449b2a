# SPDX-License-Identifier: Apache-2.0
"""Holds names and glossary together: a name is in docs/glossary.md, or anybody knows its words."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/holdfast"

_PLAIN = """
actions adapters allocating answers api asking base bootstrap cgroups checkpointer children
ckpt cli client clock codec collective completion conf config connection copier copy
credentials curve data dataset datasets dcp deepspeed demo difference digests disk dlrover
elastic embedded
environment errors failures fetch fields file files flags history host http ids imports k8s
kubernetes launch leader linux loader loading local log logged logs loop map mappings maps
megatron memory messages metrics model names naming nats network objects observe open options
output overlap parser pauses permutation permuting picture pods posix prediction private
process processes progress protocol quantities queue randomness ray reader readers reading
receivers reconcile registration render replication report requests reshard resources restore
rules run runtime sampler samples scaleplan scaling screen security server service services
settings sharded sharding show side signals sim sizes spec state status stop storage store
table templates tensorflow terminal tf timeline times tls torch train trainer training
transformers transport verify waits watching words writing zip
"""
PLAIN = frozenset(_PLAIN.split())
"""Words of the field and of plain English: a newcomer takes them as they are meant."""

_ROW = re.compile(r"^\| (.+?) \| .+ \|$", re.MULTILINE)


def entries(glossary: str) -> list[tuple[str, ...]]:
    """The words of each row: several where it names more than one form."""
    rows = [tuple(row.split(", ")) for row in _ROW.findall(glossary)]
    return [row for row in rows if row != ("word",)]


def names(root: Path) -> set[str]:
    """What packages and modules below `root` are called."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    found = {name for path in paths for name in (*path.parent.parts, path.stem)}
    return {name.strip("_") for name in found if not name.startswith("__")}


def words_of(name: str, known: Iterable[str]) -> set[str]:
    """The words of a name that are to be explained; none where the whole name is."""
    forms = {form for word in known for form in (word, f"{word}s")}
    whole = name.replace("_", " ")
    return set() if whole in forms else set(whole.split()) - forms


def known() -> set[str]:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    return {form for entry in entries(text) for form in entry}


def test_names_are_plain_or_in_the_glossary() -> None:
    explained = known()
    odd = {
        name: sorted(words)
        for name in sorted(names(SOURCE))
        if (words := words_of(name, explained) - PLAIN)
    }
    assert not odd, f"explain them in docs/glossary.md, or find better names: {odd}"


def test_plain_words_are_in_use_and_not_in_the_glossary_too() -> None:
    explained = known()
    used = {word for name in names(SOURCE) for word in words_of(name, explained)}
    assert not PLAIN - used, "remove them from PLAIN"


def test_each_word_of_the_glossary_is_there_once_and_in_the_source() -> None:
    forms = [form for entry in entries((ROOT / "docs/glossary.md").read_text()) for form in entry]
    assert len(forms) > 100
    assert len(forms) == len(set(forms)), "two rows for one word"
    paths = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".c", ".toml", ".yaml")]
    text = " ".join(path.read_text(encoding="utf-8") for path in paths)
    text = re.sub(r"[\s_#]+", " ", text + " ".join(names(SOURCE))).lower()
    stale = [form for form in forms if not re.search(rf"\b{re.escape(form)}s?\b", text)]
    assert not stale, "these words are not in src any more"


def test_the_rule_can_fail() -> None:
    glossary = "| word | meaning |\n|---|---|\n| roll call | x |\n| tally, tallies | y |\n"
    assert entries(glossary) == [("roll call",), ("tally", "tallies")]
    explained = ("roll call", "tally", "tallies", "slot")
    assert words_of("roll_call", explained) == set()
    assert words_of("slots", explained) == set()
    assert words_of("shelf", explained) == {"shelf"}
    assert words_of("slot_roll", explained) == {"roll"}
