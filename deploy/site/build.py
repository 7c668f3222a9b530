"""Build the documentation site from the Markdown pages of the repository.

The pages link each other as they lie in the repository, so that they also read well on GitHub. This script copies them
with the same folders to `.cache/site/pages`, derives the navigation from the lists of `docs/README.md` and
`docs/design/README.md`, and runs Zensical. A broken link, a missing heading or a page of `docs/` that no list has is an
error. The site is in `.cache/site/html`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
SITE = REPO / ".cache" / "site"
TOP_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s#]+)[^)\s]*\)")
_ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")

NavEntry = dict[str, Any]


def copy_pages(pages: Path) -> None:
    """Copy the pages, and the files of the repository that they link, with their folders."""
    shutil.rmtree(pages, ignore_errors=True)
    sources = [REPO / name for name in TOP_PAGES]
    sources += sorted(path for path in (REPO / "docs").rglob("*") if path.is_file())
    copied = set[Path]()
    while sources:
        source = sources.pop()
        if source in copied or not source.is_file() or not source.is_relative_to(REPO):
            continue
        copied.add(source)
        target = pages / source.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        if source.suffix == ".md":
            links = (link for _, link in _LINK.findall(source.read_text()))
            sources += [(source.parent / link).resolve() for link in links if ":" not in link]


def read_navigation() -> list[NavEntry]:
    """Return the entries of `nav`: a section for each heading of `docs/README.md`, an entry for each of its links."""
    home: NavEntry = {"Seamark": "README.md"}
    start: list[NavEntry] = [
        {"All pages": "docs/README.md"},
        {"Tutorial": "docs/tutorial.md"},
        {"Tutorial of streaming": "docs/tutorial-streaming.md"},
        {"Glossary": "docs/glossary.md"},
    ]
    navigation = [home, *start]
    for section in (REPO / "docs" / "README.md").read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        navigation.append({title: [_make_entry(name, link) for name, link in _LINK.findall(body)]})
    navigation.append({"Project": [{"Security policy": "SECURITY.md"}, {"Code of conduct": "CODE_OF_CONDUCT.md"}]})
    results = sorted((SITE / "pages" / "bench" / "results").glob("*.md"))
    navigation.append({"Results of benchmarks": [{path.stem: f"bench/results/{path.name}"} for path in results]})
    return navigation


def _make_entry(name: str, link: str) -> NavEntry:
    """Return the navigation entry of a page. The page of the design decisions has its linked pages below it."""
    target = (REPO / "docs" / link).resolve().relative_to(REPO).as_posix()
    if target != "docs/design/README.md":
        return {name: target}
    decisions: list[NavEntry] = [{"Overview": target}]
    decisions += [{title: f"docs/design/{page}"} for title, page in _LINK.findall((REPO / target).read_text())]
    return {name: decisions}


def find_unlisted_pages(entries: Any) -> set[str]:
    """Return the pages below `docs/` that no entry of the navigation names."""
    listed = set(re.findall(r"docs/[\w./-]+", repr(entries)))
    return {path.relative_to(REPO).as_posix() for path in (REPO / "docs").rglob("*.md")} - listed


def main() -> int:
    """Build the site; return the exit code of the process."""
    SITE.mkdir(parents=True, exist_ok=True)
    copy_pages(SITE / "pages")
    navigation = read_navigation()
    if unlisted := sorted(find_unlisted_pages(navigation)):
        print(f"docs/README.md or docs/design/README.md has to list: {', '.join(unlisted)}", file=sys.stderr)
        return 1
    settings = Path(__file__).with_name("mkdocs.yml").read_text()
    (SITE / "mkdocs.yml").write_text(settings + "\n" + yaml.safe_dump({"nav": navigation}, sort_keys=False))
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "--config-file",
        str(SITE / "mkdocs.yml"),
    ]
    build = subprocess.run(command, check=False, capture_output=True, text=True)
    if build.returncode:
        problems = build.stdout if "issue" in build.stdout else build.stdout + build.stderr
        print(_ANSI_COLOR.sub("", problems), file=sys.stderr)
    return build.returncode


if __name__ == "__main__":
    sys.exit(main())
