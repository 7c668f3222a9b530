"""Keeps the routes of recent paths: engines repeat a few paths, and aiohttp searches all routes for each request.

Only routes that were found are kept, and only for short paths. A route depends on the method and the path alone, not
on the client; identity and rights are checked later, for each request.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute

PATHS_MAX = 4096
PATH_CHARACTERS_MAX = 300
"""Of a path that is kept."""


class Router(web.UrlDispatcher):
    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple[str, str], tuple[dict[str, str], AbstractRoute]] = {}

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        key = request.method, request.rel_url.raw_path
        match = self._found.get(key)
        if match is not None:
            return web.UrlMappingMatchInfo(*match)  # with its own copy of the variables
        matched = await super().resolve(request)
        if matched.http_exception is None and len(key[1]) <= PATH_CHARACTERS_MAX:
            if len(self._found) >= PATHS_MAX:
                self._found.clear()
            self._found[key] = dict(matched), matched.route
        return matched
