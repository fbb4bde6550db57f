# SPDX-License-Identifier: Apache-2.0
"""Every relative link of a page leads to a file, and the README to every page."""

import re

import pytest
from markdown_pages import ROOT, links, pages


def anchors(text):
    """Return the anchors of the headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_resolve(page):
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):  # another place than this repository
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.resolve().is_relative_to(ROOT), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def test_every_page_of_docs_is_in_the_readme():
    linked = set(links((ROOT / "README.md").read_text(encoding="utf-8")))
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert found - linked == set(), "under More in README.md there is no link to these"


def test_links_are_found():
    assert links("[a](b.md) and [c\nd](e/f#g), ![picture](h.png)") == ["b.md", "e/f#g"]
    assert anchors("# One: `two` three\n## four\n") == {"one-two-three", "four"}
