"""Check a commit message: the hook `commit-msg` of `.pre-commit-config.yaml`.

    python3 deploy/commits/check_message.py .git/COMMIT_EDITMSG

The subject is a short imperative, and the body states the reason: see "Commits, changes and releases" in
CONTRIBUTING.md. The hook runs with any Python, so this file imports only the standard library.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT_CHARACTERS_MAX = 72
_SCISSORS = re.compile(r"^# -+ >8 -+$.*", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"(?:Merge|Revert|fixup!|squash!|amend!) ")
_NOT_IMPERATIVE = re.compile(r"(?!Embed|Feed|Need|Seed|Speed|Bring|String)[A-Z][a-z]+(?:ed|ing)\b|[A-Z][a-z]*[^s\W]s\b")
"""Verbs such as `Added`, `Adding` and `Adds`, and plural nouns."""


def find_faults(message: str) -> list[str]:
    """Return what is wrong with a commit message, a sentence each. Messages that Git generates have no faults."""
    text = "\n".join(line for line in _SCISSORS.sub("", message).splitlines() if not line.startswith("#")).strip()
    subject, _, rest = text.partition("\n")
    if _GENERATED.match(subject):
        return []
    if not subject:
        return ["The message is empty; write a subject and a body"]
    faults = []
    if len(subject) > SUBJECT_CHARACTERS_MAX:
        faults.append(f"The subject has {len(subject)} characters; at most {SUBJECT_CHARACTERS_MAX} are allowed")
    if not subject[0].isupper():
        faults.append(f"The subject begins with {subject[0]!r}; begin it with a capital letter")
    if match := _NOT_IMPERATIVE.match(subject):
        faults.append(f"The subject begins with {match[0]!r}; begin it with an imperative, such as 'Reject'")
    if subject.endswith("."):
        faults.append("The subject ends with a full stop; remove it")
    if rest and not rest.startswith("\n"):
        faults.append("The second line is not empty; separate the subject from the body")
    if not rest.strip():
        faults.append("The body is missing; state the reason for the change in full sentences")
    return faults


def main() -> int:
    """Print the faults of the message in the file that the first argument names, and return the exit status."""
    faults = find_faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for fault in faults:
        sys.stderr.write(f"commit message: {fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
