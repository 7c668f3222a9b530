"""The routes of recent paths: engines send the same few paths again and again, and aiohttp searches for each.

Only what was found is kept, for short paths. A result depends on the method and the path alone, not on the client;
identity and rights are checked afterwards, for each request.
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

    @property
    def kept(self) -> int:
        """The number of paths whose routes are kept."""
        return len(self._found)

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        key = request.method, request.rel_url.raw_path
        found = self._found.get(key)
        if found is not None:
            return web.UrlMappingMatchInfo(*found)  # with its own copy of the variables
        matched = await super().resolve(request)
        if matched.http_exception is None and len(key[1]) <= PATH_CHARACTERS_MAX:
            if len(self._found) >= PATHS_MAX:
                self._found.clear()
            self._found[key] = dict(matched), matched.route
        return matched
