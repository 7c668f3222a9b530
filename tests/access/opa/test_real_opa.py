"""Compare the recorded answers with a real Open Policy Agent server, and check Seamark's decisions with this server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.authorizer import GrantAuthorizer
from seamark.metaserver.access.opa import open_authorizer
from seamark.metaserver.settings.settings import Settings
from tests.access.opa.recorded import ALLOW_PATH, BATCH_PATH, RECORDED_REQUESTS
from tests.access.opa.test_opa import ANN, ORDERS, SALARIES, STAFF
from tests.services.process import CACHE, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok

pytestmark = pytest.mark.slow
_PROGRAM = CACHE / "bin" / "opa"
_POLICY = Path(__file__).with_name("seamark.rego")


@pytest.fixture
def opa_url(tmp_path: Path) -> Iterator[str]:
    if not _PROGRAM.exists():
        raise ServiceFailed("Open Policy Agent is not installed; run `make opa`")
    address = f"127.0.0.1:{choose_free_port()}"
    argv = [str(_PROGRAM), "run", "--server", "--addr", address, "--disable-telemetry", str(_POLICY)]
    with ManagedProcess(argv, log=tmp_path / "opa.log", cwd=tmp_path) as process:
        process.start(lambda: is_http_ok(f"http://{address}/health"), timeout_s=60)
        yield f"http://{address}"


def test_recorded_answers_equal_the_answers_of_the_server(opa_url: str) -> None:
    for path, question, recorded_answer in RECORDED_REQUESTS:
        answer = requests.post(opa_url + path, json={"input": question}, timeout=30)
        assert (answer.status_code, answer.json()) == (200, recorded_answer), question


async def test_decisions_follow_the_policy_of_the_server(opa_url: str) -> None:
    settings = Settings(opa_url=opa_url + ALLOW_PATH, opa_batch_url=opa_url + BATCH_PATH, opa_timeout_s=30.0)
    async with open_authorizer(settings, SystemClock(), GrantAuthorizer(None), "") as authorizer:
        assert await authorizer.allows(ANN, "readRows", ORDERS)
        assert not await authorizer.allows(ANN, "updateTable", ORDERS)
        assert await authorizer.allows_each(ANN, "readRows", [STAFF, ORDERS, SALARIES]) == [False, True, False]
        assert await authorizer.sees(ANN, [("shop",), ("staff",)]) == [True, True]
