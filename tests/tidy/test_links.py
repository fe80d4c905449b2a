# SPDX-License-Identifier: Apache-2.0
"""Links from page to page lead somewhere: to a file that is there, and to a heading that it has."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])

_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED = re.compile(r"\b(docs/[a-z0-9/-]+\.md)\b")


def headings(page: str) -> set[str]:
    """What the part of a link after `#` may be, as GitHub makes it of headings."""
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for name in _NAMED.findall(text):
        if not (ROOT / name).is_file():
            yield name
    for link in _LINK.findall(_CODE.sub("", text)):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in headings(target.read_text())):
            yield link


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 20
    dead = {str(page.relative_to(ROOT)): list(dead_links(page)) for page in PAGES}
    assert not {page: links for page, links in dead.items() if links}


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title's end\n[a](b.md) [b](#a-titles-end) [c](#no) `[d](e.md)` docs/f.md\n"
    )
    assert list(dead_links(page)) == ["docs/f.md", "b.md", "#no"]
