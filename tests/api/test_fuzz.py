"""Tests with random valid and broken requests from the specifications.

No request gets a 5xx, errors have the standard's form, and successful answers follow the Iceberg REST specification.

The tests send requests to a separate server process, so that a crash would show. Half of the requests use an existing
namespace, table and view, because requests with random names end with a 404. A failed test prints the request and the
seed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, response_schema_conformance
from schemathesis.core.errors import SchemathesisError
from schemathesis.core.result import Err
from schemathesis.schemas import APIOperation

from seamark.commands.reference import render_openapi_document
from seamark.formats.protocol.wire import decode_json
from tests.api.client import SCHEMA, VIEW_VERSION
from tests.api.rest.standard import read_specification
from tests.services.seamark import Seamark

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
EXAMPLES = 3
"""The number of random requests for each route. The fast tests use every third route."""
LONG_CAMPAIGN_EXAMPLES = 200
_EXISTING_NAMES = {"namespace": "db", "table": "t", "view": "v", "function": "f"}


def _load_specification() -> dict[str, Any]:
    """Return the Iceberg REST specification with two changes for Seamark.

    Seamark's paths have no prefix. The specification requires a plan id in every completed plan, for which the
    service holds state. Seamark holds no state for a completed plan, and sends no id, because Java's client would
    send a DELETE for each id.
    """
    spec = copy.deepcopy(read_specification())
    paths = {}
    for template, methods in spec["paths"].items():
        parameters = [
            parameter for parameter in methods.get("parameters", ()) if not parameter["$ref"].endswith("/prefix")
        ]
        paths[template.replace("/{prefix}/", "/")] = {**methods, "parameters": parameters}
    del spec["components"]["schemas"]["CompletedPlanningWithIDResult"]["allOf"][1]["required"]
    return {**spec, "paths": paths, "servers": [{"url": "/"}]}


def _list_operations(spec: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(spec)
    operations = [result.ok() for result in schema.get_all_operations() if not isinstance(result, Err)]
    assert len(operations) == sum(len(set(path) - {"parameters"}) for path in spec["paths"].values())
    return [pytest.param(operation, id=f"{operation.method.upper()} {operation.path}") for operation in operations]


STANDARD_OPERATIONS = _list_operations(_load_specification())
SEAMARK_OPERATIONS = _list_operations(decode_json(render_openapi_document().encode(), "our document"))


class FuzzTarget:
    """A server under random requests. `fill` creates `db.t` and `db.v` again if a request has dropped them."""

    def __init__(self, server: Seamark) -> None:
        self.server = server
        self.http = requests.Session()
        self._tables = f"{server.base_url}/v1/namespaces/db/tables"
        self._views = f"{server.base_url}/v1/namespaces/db/views"

    def fill(self) -> None:
        if self.http.head(f"{self._tables}/t").status_code == 404:
            self.http.post(f"{self.server.base_url}/v1/namespaces", json={"namespace": ["db"]})
            self.http.post(self._tables, json={"name": "t", "schema": SCHEMA})
        if self.http.head(f"{self._views}/v").status_code == 404:
            self.http.post(self._views, json={"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION})

    def check(self, case: schemathesis.Case[Any], *, must_conform: bool) -> None:
        """Send the case, and check the form of the answer.

        Args:
            must_conform: Check a successful answer against the schema of the specification too.
        """
        try:
            response = case.call(base_url=self.server.base_url, session=self.http, timeout=60)
        except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, UnicodeEncodeError):
            return  # HTTP cannot carry these characters.
        # The specification describes errors in two ways. Seamark sends the form that clients parse.
        must_conform = must_conform and response.status_code < 400
        checks = [not_a_server_error, *([response_schema_conformance] if must_conform else [])]
        case.validate_response(response, checks=checks)
        assert response.status_code < 500, case.as_curl_command()
        if response.status_code >= 400 and case.method.upper() != "HEAD" and response.content:
            error = decode_json(response.content, "an error").get("error")
            if isinstance(error, dict):
                assert set(error) == {"message", "type", "code", "stack"}
                assert error["code"] == response.status_code
            else:  # RFC 6749 has its own error form for the token endpoint.
                assert case.path == "/v1/oauth/tokens"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzTarget]:
    # By default, long polls stay open for a minute.
    env = {"SEAMARK_WATCH_TIMEOUT_S": "0.05", "SEAMARK_BODY_LIMIT_BYTES": "1000000"}
    with Seamark(tmp_path_factory.mktemp("fuzz") / "home", env=env) as server:
        target = FuzzTarget(server)
        target.fill()
        yield target
        assert server.running(), "the server did not survive"
        assert "unexpected error" not in server.log.read_text()
        target.http.close()


def _run_campaign(
    operation: APIOperation[Any, Any, Any, Any], target: FuzzTarget, examples: int, *, must_conform: bool
) -> None:
    """Send `examples` random requests of one operation. Half of them name a table or view that exists.

    The requests are valid or invalid. With `must_conform`, successful answers are also checked against the schema of
    the specification.
    """

    @settings(
        max_examples=examples,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def send_random_request(data: st.DataObject) -> None:
        generation_mode = data.draw(st.sampled_from(GenerationMode))
        try:
            strategy = operation.as_strategy(generation_mode=generation_mode)
        except SchemathesisError:
            strategy = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        case = data.draw(strategy)
        if data.draw(st.booleans()):
            for name in set(_EXISTING_NAMES) & set(case.path_parameters or ()):
                case.path_parameters[name] = _EXISTING_NAMES[name]
        target.fill()
        target.check(case, must_conform=must_conform)

    send_random_request()


@pytest.mark.few_cases(5)
@pytest.mark.parametrize("operation", STANDARD_OPERATIONS[::3])
def test_no_request_to_the_standard_routes_gets_a_server_error(operation: Any, target: FuzzTarget) -> None:
    _run_campaign(operation, target, EXAMPLES, must_conform=True)


@pytest.mark.few_cases(12)
@pytest.mark.parametrize("operation", SEAMARK_OPERATIONS[::3])
def test_no_request_to_seamarks_routes_gets_a_server_error(operation: Any, target: FuzzTarget) -> None:
    _run_campaign(operation, target, EXAMPLES, must_conform=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operation", STANDARD_OPERATIONS)
def test_no_request_to_the_standard_routes_gets_a_server_error_in_a_long_campaign(
    operation: Any, target: FuzzTarget
) -> None:
    _run_campaign(operation, target, LONG_CAMPAIGN_EXAMPLES, must_conform=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operation", SEAMARK_OPERATIONS)
def test_no_request_to_seamarks_routes_gets_a_server_error_in_a_long_campaign(
    operation: Any, target: FuzzTarget
) -> None:
    _run_campaign(operation, target, LONG_CAMPAIGN_EXAMPLES, must_conform=False)
