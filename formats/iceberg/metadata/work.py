"""The bound on what the updates of one commit compare with each other. Pure.

An update that adds a schema, a partition spec, a sort order or a version of a view is compared with all that there
are, as it must not be added twice. A body of 4 MiB has 20,000 such updates, which would compare for minutes, and
nothing else runs meanwhile.
"""

from __future__ import annotations

from seamark.formats.runtime.errors import BadRequest

WORK_MAX = 500_000
"""A comparison with a small schema takes a microsecond."""
_FIELDS_A_STEP = 16


class Work:
    """Counts the comparisons of one commit."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = WORK_MAX

    def compare(self, others: int, fields: int = 0) -> None:
        """Before something of so many fields is compared with so many others. BadRequest beyond WORK_MAX."""
        self._left -= others * (1 + fields // _FIELDS_A_STEP)
        if self._left < 0:
            raise BadRequest(
                "The updates add or change too many schemas, partition specs, sort orders, snapshots or versions at "
                "once: commit fewer of them together"
            )
