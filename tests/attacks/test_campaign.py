"""A hostile tenant, for hundreds of requests: it never learns a value, path or name of the other's, and never moves
its bytes.

`make test` runs two small campaigns that are always the same. The slow ones explore; a failure prints the seed and the
steps, and `TEST_SEED=<seed>` repeats it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.runs import run
from tests.attacks.world import KINDS
from tests.seeds import first_seed
from tests.services.s3 import S3


@pytest.mark.parametrize("hints", [KINDS, ()], ids=["all handles known", "nothing known"])
async def test_a_short_campaign_finds_nothing(tmp_path: Path, hints: tuple[str, ...]) -> None:
    c = await run(tmp_path / "home", 1, requests=0, hints=hints)
    assert not c.findings, c.verdict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(8))
async def test_campaigns_over_local_files_find_nothing(tmp_path: Path, number: int) -> None:
    c = await run(tmp_path / "home", first_seed() + number, requests=300)
    assert not c.findings, c.verdict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
async def test_campaigns_over_s3_find_nothing(tmp_path: Path, s3: S3, number: int) -> None:
    c = await run(tmp_path / "home", first_seed() + 100 + number, requests=300, s3=s3)
    assert not c.findings, c.verdict()
