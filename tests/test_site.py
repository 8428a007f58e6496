"""The site builds without a warning; its links and anchors lead somewhere; it needs no network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent


LOADING = ("script", "link", "img", "iframe", "source")
"""Elements whose addresses a browser loads by itself."""


class Links(HTMLParser):
    """Addresses and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: list[tuple[str, str]] = []
        """Kind of element, and address."""
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: "list[tuple[str, str | None]]") -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.addresses.append((tag, value))
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> "dict[Path, Links]":
    """The pages of the site, which is built anew with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {page: Links(page.read_text(encoding="utf-8")) for page in folder.rglob("*.html")}


@pytest.mark.slow
def test_the_site_has_every_page(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in site} == pages | {"404"}


@pytest.mark.slow
def test_links_and_anchors_of_the_site_lead_somewhere(site):
    for page, links in site.items():
        for _, address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or page.name == "404.html":  # that page has addresses from the root
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.exists(), f"{page.name}: {address}"
            if parts.fragment and target in site:
                anchors = site[target].anchors | {"__search", "__drawer"}
                assert unquote(parts.fragment) in anchors, f"{page.name}: {address}"


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    for page, links in site.items():
        for tag, address in links.addresses:
            assert tag not in LOADING or not urlsplit(address).netloc, f"{page.name}: {address}"


def links_of(page: Path) -> "list[str]":
    return re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))


OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "runtime" / "README.md"]
"""Pages that are not part of the site."""


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_other_pages_lead_somewhere(page):
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in headings(target), link


def headings(page: Path) -> "set[str]":
    """The anchors of a page's headings, without the signs that anchors leave out."""
    lines = page.read_text(encoding="utf-8").splitlines()
    words = (line.lstrip("# ").lower() for line in lines if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", each).replace(" ", "-") for each in words}
