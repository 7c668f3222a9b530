"""Finds the input topics in Kafka, and starts an intake for each table that this process owns.

A table has an input topic if the topic with the table's UUID in its name exists. Each intake has its own task, so that
a waiting topic does not delay other topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import NoSuchTable, ProducerFenced, SeamarkError, StreamRemoved
from seamark.metaserver.log.kafka.topics import InputTopic, TopicSource
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.stream_counts import TopicCounts
from seamark.metaserver.streams.topics.intake import TopicIntake

CHECK_INTERVAL_S = 5.0
"""The interval between two checks of the topics and their owners."""
_RETRY_DELAY_S = 30.0
"""The pause before an intake is restarted after an error that does not come from Kafka."""
_log = structlog.get_logger("seamark.streams")


class _RunningIntake(NamedTuple):
    """The task that reads an input topic of Kafka and appends its messages to a stream table, and the topic."""

    topic: InputTopic
    task: asyncio.Task[None]


class TopicIntakes:
    """Starts and stops intakes. An instance belongs to one event loop."""

    def __init__(
        self,
        source: TopicSource,
        owners: StreamOwners,
        clock: Clock,
        counts: TopicCounts,
        make_intake: Callable[[str, InputTopic], TopicIntake],
    ) -> None:
        """Create an instance that reads no topic yet.

        Args:
            source: Lists and opens the input topics in Kafka.
            owners: Determines whether this process owns a table, and so reads its topic.
            clock: The clock.
            counts: Receives the reasons why topics are not read.
            make_intake: Creates the object that reads the topic of a table, and appends its messages (intake).
        """
        self._source = source
        self._owners = owners
        self._clock = clock
        self._counts = counts
        self._make_intake = make_intake
        self._intakes: dict[str, _RunningIntake] = {}
        self._not_before_s: dict[str, float] = {}

    async def run(self) -> None:
        """Read the topics of the tables that this process owns, each in a task (intake), until the call is cancelled.

        Then wait until all intakes have ended. If Kafka does not answer, log the error, and try again later.
        """
        try:
            while True:
                try:
                    await self.update_intakes()
                except SeamarkError as error:
                    _log.warning("input topics are not found", error=error.message)
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            tasks = [intake.task for intake in self._intakes.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def update_intakes(self) -> None:
        """Start a task that reads the topic of each table that this process owns, and stop the tasks of other tables.

        A task that has ended is started again. If the topic had no table, or after an unexpected error, the new task
        starts only after a pause.

        Raises:
            LogUnavailable: Kafka does not answer.
        """
        topics = await self._source.list_topics()
        now_s = self._clock.monotonic()
        for uuid, intake in list(self._intakes.items()):
            # A topic that was deleted and created again has a new id.
            if intake.task.done() or topics.get(uuid) != intake.topic or not self._owners.is_owner(uuid):
                intake.task.cancel()
                await asyncio.gather(intake.task, return_exceptions=True)
                del self._intakes[uuid]
                if topics.get(uuid) is None or not self._owners.is_owner(uuid):
                    self._counts.waiting.pop(uuid, None)
        for uuid, topic in topics.items():
            if uuid not in self._intakes and self._owners.is_owner(uuid) and self._not_before_s.get(uuid, 0) <= now_s:
                task = asyncio.create_task(self._read(uuid, topic), name=f"topic {topic.name}")
                self._intakes[uuid] = _RunningIntake(topic, task)
        self._not_before_s = {uuid: until_s for uuid, until_s in self._not_before_s.items() if uuid in topics}

    async def _read(self, uuid: str, topic: InputTopic) -> None:
        try:
            await self._make_intake(uuid, topic).run(self._source)
        except ProducerFenced:
            _log.info("another process reads an input topic", topic=topic.name)
        except (NoSuchTable, StreamRemoved):
            self._not_before_s[uuid] = self._clock.monotonic() + _RETRY_DELAY_S
            _log.info("an input topic has no table", topic=topic.name)
        except SeamarkError as error:
            self._counts.waiting[uuid] = error.message
            _log.warning("an input topic is not read; it is tried again", topic=topic.name, error=error.message)
        except Exception:  # noqa: BLE001  a bug of one topic must not end the intakes of all
            self._not_before_s[uuid] = self._clock.monotonic() + _RETRY_DELAY_S
            _log.exception("an input topic is not read; it is tried again", topic=topic.name)
