"""The settings of the objects gateway and of its cache, a part of the settings in `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of the objects gateway and of its cache."""

    gateway_port: int = setting(
        0, "TCP port of the objects gateway, an S3 endpoint. With 0, there is no gateway.", minimum=0, maximum=65535
    )
    gateway_url: str = setting(
        "",
        "URL of the objects gateway for clients, without a path. If it is empty, clients use the address that the "
        "gateway listens on.",
        schemes=("http", "https"),
    )
    gateway_keys_s: int = setting(
        3600,
        "Longest lifetime in seconds of the keys for the gateway. A key is valid for at least half of it.",
        minimum=60,
        maximum=43_200,
    )
    gateway_requests_limit: int = setting(
        256,
        "Maximum number of concurrent requests of the gateway per worker. One principal can use half of them.",
        minimum=2,
    )
    gateway_put_limit_bytes: int = setting(
        5 << 30,
        "Size in bytes of the largest object, or part of a multipart upload, that a request can send to the gateway.",
        minimum=1024,
    )
    gateway_uploads_limit: int = setting(
        2000,
        "Maximum number of unfinished multipart uploads in s3_folder. One principal can have half of them. Further "
        "uploads get 503. A store behind the gateway has its own limits.",
        minimum=2,
    )
    gateway_uploads_s: int = setting(
        7 * 86400,
        "Seconds without changes after which the server deletes an unfinished multipart upload in s3_folder.",
        minimum=60,
    )
    gateway_cache_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for the gateway's cache of immutable objects, per worker. If it and "
        "gateway_cache_disk_bytes are 0, the gateway caches nothing.",
        minimum=0,
    )
    gateway_cache_disk_bytes: int = setting(
        16 << 30,
        "Disk budget in bytes for the gateway's cache, shared by the workers of a machine. With 0, the cache is only "
        "in memory.",
        minimum=0,
    )
    gateway_cache_folder: str = setting(
        "", "Folder of the gateway's cache. If it is empty, the folder is <home>/cache/objects."
    )
    gateway_cache_block_bytes: int = setting(
        256 << 10,
        "Size in bytes of the blocks in which the gateway caches objects. Changing this setting empties the cache.",
        minimum=16 << 10,
        maximum=16 << 20,
    )
    gateway_cache_request_bytes: int = setting(
        8 << 20,
        "Length in bytes of the longest range that the gateway's cache reads with one request to the store.",
        minimum=64 << 10,
    )
    gateway_cache_fetch_bytes: int = setting(
        128 << 20,
        "Memory budget in bytes for the reads from the store that the gateway's cache has in progress, per worker. "
        "Further reads bypass the cache.",
        minimum=1 << 20,
    )
    gateway_hedged_percent: int = setting(
        0,
        "Maximum percentage of its reads from the store that the gateway's cache sends a second time. It repeats a "
        "read whose answer takes longer to begin than 95 % of the earlier answers, and uses the answer that begins "
        "first. With 0, it repeats no reads.",
        minimum=0,
        maximum=100,
    )
    gateway_send_bytes: int = setting(
        128 << 20,
        "Memory budget in bytes for answers that the gateway's clients have not received yet, per worker. One "
        "principal can use gateway_cache_holder_percent of it. If little of the budget is free, the gateway sends "
        "answers in smaller parts of at least 16 KiB.",
        minimum=1 << 20,
    )
    gateway_cache_pinned_percent: int = setting(
        25,
        "Percentage of the gateway's cache, in memory and on disk, that is reserved for metadata and for tables with "
        "seamark.cache.pinned = true. Other objects cannot evict them.",
        minimum=0,
        maximum=90,
    )
    gateway_cache_holder_percent: int = setting(
        50,
        "Maximum percentage of each tier of the gateway's cache, and of its reserved part, that the reads of one "
        "principal can fill. If the server has no logins, all requests have the same principal, which can fill all.",
        minimum=1,
        maximum=100,
    )
    gateway_cache_whole_bytes: int = setting(
        64 << 20,
        "Size in bytes of the largest metadata file or pinned object that the gateway reads completely at its first "
        "read. Of larger objects, it reads only the requested parts.",
        minimum=0,
    )
    gateway_cache_recheck_s: float = setting(
        300.0,
        "Seconds after which the gateway compares the ETag of a cached object with the store again. Cached objects "
        "should never change; this setting limits the time for which the gateway serves an object that a program has "
        "replaced in the store.",
        minimum=0.0,
    )
