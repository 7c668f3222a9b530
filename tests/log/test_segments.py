"""The log in segment files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.log.segments import SegmentLimits, SegmentLog, open_segment_log
from tests.log.contract import StreamLogContract


class TestSegmentLog(StreamLogContract):
    @pytest.fixture
    async def log(self, tmp_path: Path) -> AsyncIterator[SegmentLog]:
        async with open_segment_log(tmp_path / "log", SystemClock(), SegmentLimits()) as log:
            yield log


class TestSmallSegments(StreamLogContract):
    """Each segment has a few records, so that reads cross segments and use index files."""

    @pytest.fixture
    async def log(self, tmp_path: Path) -> AsyncIterator[SegmentLog]:
        async with open_segment_log(tmp_path / "log", SystemClock(), SegmentLimits(segment_bytes=1024)) as log:
            yield log
