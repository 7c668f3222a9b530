"""The figures of a fleet of 100 replicas with 10⁹ files in 10⁵ tables: hash shares, cache hit rates, store load.

The hashing is the server's own. The hit rates come from a simulation of least-recently-used caches in which tables,
files and caches have a hundredth of their size; the tables are requested with a Zipf distribution. All random numbers
come from one seed, so the figures are the same everywhere.

    python -m bench.fleet.arithmetic            # prints the figures python -m bench.fleet.arithmetic --write    #
    writes them into docs/explanation/fleet.md
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from seamark.cache.rendezvous import Rendezvous
from seamark.metaserver.settings.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "fleet.md"
BEGIN, END = "<!-- figures: bench.fleet.arithmetic -->", "<!-- end of figures -->"
SEED = 22


@dataclass(frozen=True)
class FleetSize:
    files: int = 10**9
    tables: int = 10**5
    replicas: int = 100
    entries: int = 1000
    """The number of files in a manifest."""
    bytes_per_manifest: int = 407
    """The bytes of a manifest for each file of 20 columns, from `bench/results/planning_memory.md`."""
    bytes_per_block: int = 444
    """The bytes of a decoded manifest for each file, from `bench/results/planning_memory.md`."""
    plans_each_s: int = 200
    """The number of plans per second at each replica."""
    commits_s: int = 300
    """The number of commits per second of the whole fleet: each table commits about every 5 minutes."""

    @property
    def manifests(self) -> int:
        return self.files // self.entries


@dataclass(frozen=True)
class Shares:
    """The shares of the keys that the replicas own, relative to the mean."""

    least_share: float
    largest_share: float
    moved_by_join: float
    """The share of all keys that move to another replica after one replica joins."""
    moved_by_leave: float


def compute_shares(fleet: FleetSize, keys: int) -> Shares:
    names = [f"10.0.{number // 250}.{number % 250}:8183" for number in range(fleet.replicas + 1)]
    rng = random.Random(SEED)
    folder = "s3://lake/w/t{}/metadata/{:032x}-m0.avro"
    locations = [folder.format(rng.randrange(fleet.tables), rng.getrandbits(128)) for _ in range(keys)]
    old_ring, new_ring = Rendezvous(dict.fromkeys(names[:-1], 1.0)), Rendezvous(dict.fromkeys(names, 1.0))
    owners = [old_ring.rank(key, 1)[0] for key in locations]
    owned_counts = Counter(owners)
    moved_keys = sum(new_ring.rank(key, 1)[0] != owner for key, owner in zip(locations, owners, strict=True))
    mean = keys / fleet.replicas
    return Shares(
        least_share=min(owned_counts.values()) / mean,
        largest_share=max(owned_counts.values()) / mean,
        moved_by_join=moved_keys / keys,
        moved_by_leave=owned_counts[names[0]] / keys,
    )


class LruCache:
    """A cache of tables with a budget in bytes, which removes the least recently used table first."""

    def __init__(self, budget_bytes: float) -> None:
        self._budget = budget_bytes
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._used_bytes = 0

    def use_or_add(self, key: int, size_bytes: int) -> bool:
        """Return whether the cache has the key.

        A key in the cache becomes the most recently used. A new key is added if it fits the budget, and may remove
        others.
        """
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        if size_bytes <= self._budget:
            self._sizes[key] = size_bytes
            self._used_bytes += size_bytes
            while self._used_bytes > self._budget:
                self._used_bytes -= self._sizes.popitem(last=False)[1]
        return False


@dataclass(frozen=True)
class HitRates:
    """The places where simulated plans find the manifests of their table, as fractions of all plans.

    Attributes:
        own_cache: The fraction that finds decoded manifests in the cache of its replica.
        peers: The fraction that gets them from other replicas.
        storage: The fraction that reads them from the storage.
    """

    own_cache: float
    peers: float
    storage: float
    storage_reads_per_commit: float
    """The reads of the storage for the manifest of a commit: one read if any replica plans the table."""
    storage_reads_per_commit_without_peers: float
    """The same number if replicas get no manifests from each other. Each replica then reads the manifest itself."""


def simulate_hit_rates(fleet: FleetSize, settings: Settings, *, scale: int, requests: int) -> HitRates:
    """Simulate the caches with tables, files and budgets at 1/`scale` of their size, and return the hit rates.

    The simulation has a tenth of the replicas, each with a peer budget that is ten times as large. The number of
    replicas changes only which replica owns a table.
    """
    rng = random.Random(SEED)
    replicas, tables = fleet.replicas // 10, fleet.tables // scale
    weights = [1 / (rank + 1) for rank in range(tables)]
    popularity = list(accumulate(weights))
    sizes = _draw_table_sizes(rng, tables, fleet.files // scale)
    own_caches = [LruCache(settings.plan_disk_bytes / scale) for _ in range(replicas)]
    shared_cache = LruCache(settings.peer_disk_bytes * fleet.replicas / scale)
    counts: Counter[str] = Counter()
    versions: Counter[int] = Counter()
    read_versions: list[dict[int, int]] = [{} for _ in range(replicas)]
    commits_per_plan = fleet.commits_s / (fleet.plans_each_s * fleet.replicas)

    def draw() -> int:
        return bisect_left(popularity, rng.random() * popularity[-1])

    for number in range(requests):
        if rng.random() < commits_per_plan:
            versions[draw()] += 1
            counts["commits"] += 1
        table, replica = draw(), rng.randrange(replicas)
        if own_caches[replica].use_or_add(table, sizes[table] * fleet.bytes_per_block):
            source = "own"
        else:
            source = "peers" if shared_cache.use_or_add(table, sizes[table] * fleet.bytes_per_manifest) else "storage"
        if number >= requests // 2:  # The first half of the requests fills the caches.
            counts[source] += 1
        # The first plan of a version on a replica needs the new manifest. Another replica may have read it before.
        version = versions[table]
        if read_versions[replica].get(table, 0) < version:
            counts["reads without peers"] += 1
            counts["reads with peers"] += all(item.get(table, 0) < version for item in read_versions)
            read_versions[replica][table] = version
    total, commits = requests - requests // 2, counts["commits"]
    return HitRates(
        own_cache=counts["own"] / total,
        peers=counts["peers"] / total,
        storage=counts["storage"] / total,
        storage_reads_per_commit=counts["reads with peers"] / commits,
        storage_reads_per_commit_without_peers=counts["reads without peers"] / commits,
    )


def _draw_table_sizes(rng: random.Random, tables: int, files: int) -> Sequence[int]:
    """Return the numbers of files of the tables, drawn from a log-normal distribution that adds up to about `files`.

    As in warehouses, most tables are small, and a few have most of the files.
    """
    relative_sizes = [rng.lognormvariate(0, 2.0) for _ in range(tables)]
    files_per_unit = files / sum(relative_sizes)
    return [max(1, round(size * files_per_unit)) for size in relative_sizes]


def format_figures() -> str:
    """Return the table of figures for the documentation page, in Markdown.

    The shares of the replicas are measured with 20,000 file names. The hit rates come from 60,000 simulated plans of
    tables and caches at 1/100 of their size.
    """
    fleet, settings = FleetSize(), Settings()
    ring, rates = compute_shares(fleet, keys=20_000), simulate_hit_rates(fleet, settings, scale=100, requests=60_000)
    misses = rates.peers + rates.storage
    raw, blocks = fleet.files * fleet.bytes_per_manifest, fleet.files * fleet.bytes_per_block
    plans_s = fleet.plans_each_s * fleet.replicas
    renewals_s = fleet.replicas / (settings.peer_lease_s / 3)
    rows = [
        ("manifests, of 1,000 files each", f"{fleet.manifests:,}"),
        ("manifests as files, 407 bytes a file", _format_size(raw)),
        ("share of a replica", _format_size(raw / fleet.replicas)),
        ("default budget of a replica for it (`peer_disk_bytes`)", _format_size(settings.peer_disk_bytes)),
        ("decoded manifests, 444 bytes a file", _format_size(blocks)),
        (
            "fraction of the decoded manifests that fits the budget of one replica (`plan_disk_bytes`)",
            f"{settings.plan_disk_bytes / blocks:.1%}",
        ),
        ("files that one of 100 replicas owns", f"{ring.least_share:.2f} to {ring.largest_share:.2f} of the mean"),
        ("files that move when a replica joins", f"{ring.moved_by_join:.2%}, ideal {1 / (fleet.replicas + 1):.2%}"),
        ("files that move when a replica leaves", f"{ring.moved_by_leave:.2%}, ideal {1 / fleet.replicas:.2%}"),
        ("plans that find their manifests decoded on their replica", f"{rates.own_cache:.1%}"),
        ("plans that find them on other replicas", f"{rates.peers:.1%}"),
        ("plans that read them from the storage", f"{rates.storage:.1%}"),
        ("… without other replicas", f"{misses:.1%}"),
        ("reads of the storage for the manifest of a commit", f"{rates.storage_reads_per_commit:.2f}"),
        ("… without other replicas, with 10 that plan", f"{rates.storage_reads_per_commit_without_peers:.2f}"),
        ("table pointers that all replicas read per second, at 200 plans per second on each replica", f"{plans_s:,}"),
        ("renewals of leases a second", f"{renewals_s:.0f}"),
        ("rows that the renewals read a second", f"{renewals_s * fleet.replicas:,.0f}"),
        ("commits a second, a transaction each", f"{fleet.commits_s}"),
    ]
    return "\n".join(["| figure | value |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows)])


def _format_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def replace_figures(page: str, text: str) -> str:
    """Return `page` with `text` between the marks `BEGIN` and `END`.

    Raises:
        ValueError: The page does not contain the marks.
    """
    text_before, begin, text_after = page.partition(BEGIN + "\n")
    _, end, text_after_end = text_after.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} does not contain the marks {BEGIN!r} and {END!r}")
    return f"{text_before}{begin}{text}\n{end}{text_after_end}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the figures into the documentation page")
    text = format_figures()
    if parser.parse_args().write:
        PAGE.write_text(replace_figures(PAGE.read_text(), text))
    print(text)


if __name__ == "__main__":
    main()
