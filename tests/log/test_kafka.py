"""The log in Apache Kafka, over a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.log.kafka.client import KafkaAddress, open_kafka_log
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog
from tests.log.contract import DurableLogContract, Opener, StreamLogContract
from tests.services.kafka import Kafka

pytestmark = pytest.mark.xdist_group("kafka")


class TestKafkaLog(StreamLogContract, DurableLogContract):
    @pytest.fixture
    async def log(self, opener: Opener) -> AsyncIterator[KafkaLog]:
        async with opener() as log:
            yield log

    @pytest.fixture
    def opener(self, kafka: Kafka) -> Opener:
        address = KafkaAddress(servers=kafka.address, prefix=kafka.create_prefix())
        return partial(open_kafka_log, address, SystemClock(), KafkaLimits())
