"""No text of a client makes a regular expression try more than a few ways at each character.

While one is matched, no other thread of the process runs. Texts are as long as their limits allow. With backtracking,
each of them would take minutes to hours.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from seamark.connector.client.errors import BadRequest as StatementRefused
from seamark.connector.jobs.statements import TEXT_MAX, parse_statement
from seamark.connector.trino.statements.lexer import UnsupportedStatement, tokens_of
from seamark.connector.trino.statements.scans import STATEMENT_MAX
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.column_ttl import COLUMNS, TtlPolicy
from seamark.metaserver.iceberg.types.types import canonical_primitive

pytestmark = pytest.mark.timeout(60)
BLANKS = " " * 1_000_000


@pytest.mark.parametrize("length", [900, 1_000_000])
@pytest.mark.parametrize("text", ["geometry({0}", "geography({0}", "geography({0},{0}", "geometry{0}", "decimal({0}"])
def test_types(text: str, length: int) -> None:
    with pytest.raises(BadRequest) as refused:
        canonical_primitive(text.format(BLANKS[: length // text.count("{0}")]))
    assert len(str(refused.value)) < 1200


def test_types_with_blanks_are_read() -> None:
    assert canonical_primitive(f"geography(  srid:1 ,{BLANKS[:900]}Karney )") == "geography(srid:1, karney)"
    assert canonical_primitive(f"geometry{BLANKS[:900]}( OGC:CRS84 )") == "geometry"


@pytest.mark.parametrize("text", [f"a{BLANKS}", f"a{BLANKS}b,", f'"a{BLANKS}', '"' * 999_999, "a:1," * 250_000])
def test_ages_of_columns(text: str) -> None:
    with pytest.raises(BadRequest):
        TtlPolicy.of({COLUMNS: text})


def test_ages_of_columns_with_blanks_are_read() -> None:
    policy = TtlPolicy.of({COLUMNS: f' a b {BLANKS}: 2d,{BLANKS}"c""d"{BLANKS}={BLANKS}1 w '})
    assert policy is not None
    assert policy.ages_h == {"a b": 48, 'c"d': 168}


@pytest.mark.parametrize("part", ["/* ", "'", '"', "`", "1e", "1.", "-", "/", "--"])
def test_statements(part: str) -> None:
    text = part * (STATEMENT_MAX // len(part) - 1) + "!"
    for read, given in ((tokens_of, text), (parse_statement, f"ALTER TABLE t {text[: TEXT_MAX - 100]}")):
        with suppress(UnsupportedStatement, StatementRefused):
            read(given)
