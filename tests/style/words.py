"""The words that documents, docstrings and messages avoid: `banned_words.txt`, parsed into rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BANNED_WORDS = Path(__file__).with_name("banned_words.txt")
_CODE = re.compile(r"`[^`]*`")
_LINK_TARGET = re.compile(r"\]\([^)\s]*\)")


@dataclass(frozen=True)
class Rule:
    """A rule: `pattern` must not occur, and `instead` is the replacement that the failing test prints."""

    pattern: re.Pattern[str]
    instead: str


def read_rules(text: str) -> list[Rule]:
    """Parse the rules, one on each line.

    Raises:
        ValueError: A line has no tab or no replacement.
        re.error: A pattern does not compile.
    """
    rules = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, tab, instead = line.partition("\t")
        if not tab or not instead.strip():
            raise ValueError(f"{line!r} must be a pattern, a tab and a replacement")
        rules.append(Rule(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), instead))
    return rules


def find_banned(text: str, rules: list[Rule]) -> Iterator[str]:
    """Yield `line: 'words': write …` for each match. Phrases are also found across line breaks."""
    prose = _LINK_TARGET.sub("]()", _CODE.sub(_blank_out, text))
    for rule in rules:
        for match in rule.pattern.finditer(prose):
            line = prose.count("\n", 0, match.start()) + 1
            yield f"{line}: {match[0]!r}: write {rule.instead}"


def _blank_out(code: re.Match[str]) -> str:
    """Return inline code with only the line breaks of `code`, so that line numbers stay right."""
    return "`" + "\n" * code[0].count("\n") + "`"
