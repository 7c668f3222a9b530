"""Fixtures: a star schema, and a server whose clock a test can advance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.api.plans.test_joins import Star, create_star
from tests.api.plans.test_plan_tables import PlanApi, open_plan_api


@pytest.fixture
async def star(api: Api) -> Star:
    return await create_star(api)


@pytest.fixture
async def plan_api(tmp_path: Path) -> AsyncIterator[PlanApi]:
    async with open_plan_api(tmp_path) as plan_api:
        yield plan_api
