"""Links of the pages lead somewhere: to a file of the repository, and to a heading that is there.

Left out: addresses of the web, which no test asks for.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, PAGES, named

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Return what a link may name in a page: its headings in lower case, without signs, with dashes for spaces."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in HEADING.findall(BLOCK.sub("", page))}


def broken_links(path: Path, page: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(BLOCK.sub("", page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file
        gone = not target.exists()
        if gone or (anchor and anchor not in anchors(target.read_text(encoding="utf-8") if file else page)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_link_leads_somewhere(path: Path) -> None:
    """To a file, and to a heading in it."""
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    """The control: no such file, no such heading, here and elsewhere; beside them links that lead somewhere."""
    (tmp_path / "other.md").write_text("# It's there, `too`\n", encoding="utf-8")
    good = "[a](other.md) [b](other.md#its-there-too) [c](#here) [d](https://example.com/x.md)\n# Here\n"
    assert broken_links(tmp_path / "page.md", good) == []
    bad = "[a](others.md) [b](other.md#there) [c](#there)\n# Here\n```\n# there\n```\n"
    assert broken_links(tmp_path / "page.md", bad) == ["others.md", "other.md#there", "#there"]
