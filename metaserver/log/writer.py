"""Writes to the active segment. All methods block, and are called from one thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from seamark.formats.runtime.errors import LogFull
from seamark.metaserver.log.files import LogFile
from seamark.metaserver.log.frames import FrameKind, encode_frame, encode_mark
from seamark.metaserver.log.index import FramePlace
from seamark.metaserver.log.recovery import FULL

_JOINED_BYTES_MAX = 1 << 20
"""The maximum size of frames that are copied together, because a write of many small parts takes longer."""


class SegmentWriter:
    """Appends groups of frames to one segment.

    Attributes:
        position: The position after the last durable frame and its mark.
        durable_position: The position before which all bytes are durable. The last mark may not be durable.
    """

    def __init__(self, number: int, file: LogFile, position: int) -> None:
        self.number = number
        self.position = self.durable_position = position
        self._file = file

    def write(self, frames: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[FramePlace]:
        """Write frames, make them durable together, and return their places.

        A mark follows the frames after the sync. It shows later that the frames before it were durable.

        Args:
            frames: The encoded entry and the payloads of each frame.

        Raises:
            LogFull: The disk is full. Nothing of the frames remains in the file.
            OSError: The disk failed. It is unknown which bytes are durable.
        """
        position = self.position
        parts: list[bytes] = []
        places: list[FramePlace] = []
        for meta, payloads in frames:
            frame = encode_frame(self.number, position, FrameKind.ENTRY, meta, payloads)
            length = sum(map(len, frame))
            places.append(FramePlace(position, length))
            parts += frame
            position += length
        # Join small parts, because a copy is faster than a system call with many parts.
        if position - self.position <= _JOINED_BYTES_MAX:
            parts = [b"".join(parts)]
        try:
            self._file.write(self.position, parts)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Truncate the file durably before the answer, because a crash must not bring back refused frames.
            self._file.truncate(self.position)
            self._file.sync()
            raise LogFull(
                "The disk of the log is full, and no row of the request was stored; make room, then retry"
            ) from error
        self._file.sync()
        self.position = self.durable_position = position
        mark = encode_mark(self.number, position)
        with suppress(OSError):  # A mark is optional, and the next frame overwrites a partial mark.
            self._file.write(position, [mark])
            self.position += len(mark)
        return places

    def finish(self) -> None:
        """Close a complete segment, and release the reserved space that it does not need.

        The writer adds a mark after each sync, which shows that all frames before it are durable. The last mark is
        removed, because a complete segment needs no mark, and the checksum of the segment must not depend on it.
        """
        with suppress(OSError):  # If this fails, the file only keeps its reserved space and the mark.
            self._file.truncate(self.durable_position)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
