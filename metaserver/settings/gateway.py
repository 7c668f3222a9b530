"""The settings of the objects gateway and of its cache. They are a part of `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    gateway_port: int = setting(
        0, "TCP port of the objects gateway, an S3 endpoint. With 0, there is no gateway.", minimum=0, maximum=65535
    )
    gateway_url: str = setting(
        "",
        "URL of the objects gateway for clients, without a path. If it is empty, clients get its bound address.",
        schemes=("http", "https"),
    )
    gateway_keys_s: int = setting(
        3600,
        "Longest lifetime in seconds of keys for the gateway; the shortest is half of it.",
        minimum=60,
        maximum=43_200,
    )
    gateway_requests_limit: int = setting(
        256, "Concurrent requests of the gateway per worker; a principal can use half of them.", minimum=2
    )
    gateway_put_limit_bytes: int = setting(5 << 30, "Largest object or part in a request of the gateway.", minimum=1024)
    gateway_uploads_limit: int = setting(
        2000,
        "Unfinished multipart uploads in s3_folder; a principal can have half of them. Beyond: 503. A store behind the "
        "gateway has its own limits.",
        minimum=2,
    )
    gateway_uploads_s: int = setting(
        7 * 86400,
        "Seconds without changes after which an unfinished multipart upload in s3_folder is deleted.",
        minimum=60,
    )
    gateway_cache_memory_bytes: int = setting(
        256 << 20,
        "Memory budget of the gateway's cache of immutable objects, per worker. With 0 here and in "
        "gateway_cache_disk_bytes, the gateway caches nothing.",
        minimum=0,
    )
    gateway_cache_disk_bytes: int = setting(
        16 << 30,
        "Disk budget of the gateway's cache, shared by the workers of a machine; 0 disables the disk tier.",
        minimum=0,
    )
    gateway_cache_folder: str = setting("", "Folder of the gateway's cache. Empty: <home>/cache/objects.")
    gateway_cache_block_bytes: int = setting(
        256 << 10,
        "Size of the blocks in which the gateway caches objects. A change empties the cache.",
        minimum=16 << 10,
        maximum=16 << 20,
    )
    gateway_cache_request_bytes: int = setting(
        8 << 20, "Longest range that the gateway's cache reads with one request to the store.", minimum=64 << 10
    )
    gateway_cache_fetch_bytes: int = setting(
        128 << 20,
        "Memory budget for reads from the store that the gateway's cache has in progress, per worker. Beyond it, reads "
        "bypass the cache.",
        minimum=1 << 20,
    )
    gateway_hedged_percent: int = setting(
        0,
        "Largest part of its reads of the store that the gateway's cache sends a second time, because their answers "
        "take longer to begin than 95 % of the earlier answers; the answer that begins first is used. With 0, "
        "it sends none.",
        minimum=0,
        maximum=100,
    )
    gateway_send_bytes: int = setting(
        128 << 20,
        "Memory budget for bytes of answers that clients of the gateway have not taken yet, per worker; of it, a "
        "principal has gateway_cache_holder_percent. Near it, answers are sent in smaller parts, of 16 KiB at least.",
        minimum=1 << 20,
    )
    gateway_cache_pinned_percent: int = setting(
        25,
        "Part of the gateway's cache, in memory and on disk, for metadata and for tables with "
        "seamark.cache.pinned = true. Other objects cannot evict them.",
        minimum=0,
        maximum=90,
    )
    gateway_cache_holder_percent: int = setting(
        50,
        "Largest part of each tier of the gateway's cache, and of its pinned part, that the reads of one principal can "
        "fill. Without logins there is one principal, which can fill all.",
        minimum=1,
        maximum=100,
    )
    gateway_cache_whole_bytes: int = setting(
        64 << 20,
        "Largest metadata file or pinned object that the gateway reads whole at its first read; of larger objects it "
        "reads the requested parts.",
        minimum=0,
    )
    gateway_cache_recheck_s: float = setting(
        300.0,
        "Seconds after which the gateway checks the ETag of a cached object with the store again. Objects in the cache "
        "are immutable; this limits the effect of a program that replaces them in the store.",
        minimum=0.0,
    )
