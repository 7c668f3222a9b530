"""The Markdown that the pages use: fenced blocks and what tests do with them, headings, links, inline code.

A comment alone on the line above a fence says what the tests do with the block:

| comment | block | action |
|---|---|---|
| `<!-- run -->` | bash, python | runs the block; a bash block leaves its environment to the blocks after it |
| `<!-- run: server -->` | bash | starts in the background; the test goes on once `/readyz` answers |
| `<!-- run: spark-catalog -->` | bash | its `--conf` lines are the catalog that later Spark blocks use |
| `<!-- run: spark -->` | sql | runs in Spark, statement by statement |
| `<!-- file: name -->` | any | is written to `name` in the page's folder |
| `<!-- output -->` | text | is the output of the block before it; `…` stands for any text |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^\s*```(?P<language>\w*)\s*$")
_MARK = re.compile(r"^\s*<!-- (run|run: [\w-]+|output|file: [\w./-]+) -->\s*$")
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        mark: The text of the comment above the block, or empty.
        text: The content of the block.
        line: The line of the block, from 1.
    """

    language: str
    mark: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(REPO))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        """The fenced blocks of the page, with the mark of each: the HTML comment above it, which says how to run it.

        Raises:
            ValueError: A fence is not closed, or no block follows a comment.
        """
        blocks: list[Block] = []
        open_fence: tuple[str, str, int] | None = None  # The language, mark and line of the block that is being read.
        mark, body = "", list[str]()
        for number, line in enumerate(self.text.splitlines(), 1):
            fence = _FENCE.match(line)
            if open_fence is not None:
                if fence and not fence["language"]:
                    language, block_mark, first_line = open_fence
                    blocks.append(Block(language, block_mark, "\n".join(body) + "\n", first_line))
                    open_fence, body = None, []
                else:
                    body.append(line)
            elif fence:
                open_fence, mark = (fence["language"], mark, number), ""
            elif mark:
                raise ValueError(f"{self}:{number}: no block follows the comment {mark!r}")
            elif mark_match := _MARK.match(line):
                mark = mark_match[1]
        if open_fence is not None:
            _, _, first_line = open_fence
            raise ValueError(f"{self}:{first_line}: the block is not closed")
        return blocks

    @cached_property
    def prose(self) -> str:
        """The text outside of fenced blocks."""
        return re.sub(r"^\s*```\w*\s*$.*?^\s*```\s*$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @property
    def links(self) -> list[str]:
        return _LINK.findall(_CODE.sub("", self.prose))  # `bucket[16](id)` is not a link.

    @property
    def inline_code(self) -> list[str]:
        return _CODE.findall(self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors that GitHub makes from headings.

        They are in lower case, with dashes for spaces, and keep only letters, digits, - and _.
        """
        headings = re.findall(r"^#+ (.+)$", self.prose, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def read_all_pages() -> list[Page]:
    """Return the pages in the root and everything below docs/."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
    root_pages = (Page(REPO / name) for name in names)
    return [*root_pages, *(Page(path) for path in sorted((REPO / "docs").rglob("*.md")))]
