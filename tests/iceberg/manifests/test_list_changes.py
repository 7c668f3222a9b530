"""Tests that a manifest list decoded with the help of a neighbouring snapshot's list equals the list decoded alone.

Lists add, remove, replace, reorder and repeat manifests. Their writers differ in the order of fields (also fields
before the path), in codecs and in optional fields.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from seamark.formats.iceberg.manifests.manifest import DecodedList, decode_list, decode_manifest_list
from tests.planner.lakes.manifests import Manifest, Style, encode_manifest_list
from tests.seeds import first_seed, mark_fast

LISTS = 12
COUNTS = {0: (0, 0), 1: (1, 1), 2: (0, 0)}
"""The numbers of files and of rows by the status of entries: existing, added and deleted."""


def make_manifest(rng: random.Random) -> Manifest:
    """Return a manifest with values from a small set, so that manifests often differ in one field or the path only."""
    summary: dict[str, Any] = {"contains_null": rng.random() < 0.5, "contains_nan": rng.choice([None, False])}
    bounds = [rng.choice([None, b"", b"a", b"bb"]) for _ in range(2)]
    summary |= {"lower_bound": bounds[0], "upper_bound": bounds[1]}
    partitions = rng.choice([None, [], [summary], [summary, summary]])
    counts = COUNTS | {1: (rng.choice([1, 200]), 1)}
    path = "m" * rng.randrange(1, 4)
    return Manifest(
        path,
        length=rng.choice([5, 5000]),
        content=0,
        spec_id=rng.randrange(2),
        sequence=1,
        min_sequence=1,
        snapshot_id=7,
        entries=[],
        partitions=partitions,
        counts=counts,
    )


def change_randomly(manifests: list[Manifest], rng: random.Random) -> list[Manifest]:
    draw = rng.random()
    position = rng.randrange(len(manifests) + 1)
    if draw < 0.3:
        return [make_manifest(rng), *manifests]
    if draw < 0.5:
        return [*manifests[:position], make_manifest(rng), *manifests[position:]]
    if draw < 0.7:
        return [*manifests[:position], *manifests[position + rng.randrange(1, 4) :]]
    if draw < 0.8:
        return rng.sample(manifests, len(manifests))
    if draw < 0.9:
        return [*manifests, *manifests[position:]]
    return manifests


@pytest.mark.parametrize("round_number", mark_fast(range(60), 8))
def test_manifest_list_decoded_with_a_base_equals_the_list_decoded_alone(round_number: int) -> None:
    seed = first_seed() * 1000 + round_number
    rng = random.Random(seed)
    styles = [Style.draw_style(rng) for _ in range(2)]
    manifests = [make_manifest(rng) for _ in range(rng.randrange(12))]
    previous_list: DecodedList | None = None
    for number in range(LISTS):
        style = styles[0] if rng.random() < 0.9 else styles[1]
        data = encode_manifest_list(
            [(manifest, None) for manifest in manifests],
            version=2,
            style=style,
            header={"number": str(number)},
        )
        decoded_list = decode_list(data, "l", previous_list)
        assert decoded_list.manifests == decode_manifest_list(data, "l"), f"seed {seed}"
        previous_list = decoded_list
        for _ in range(rng.randrange(3)):
            manifests = change_randomly(manifests, rng)


def test_manifest_list_with_a_new_manifest_reuses_the_other_manifests() -> None:
    rng = random.Random(1)
    style = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=True, seed=0)
    old_manifests = [make_manifest(rng) for _ in range(50)]

    def decode(manifests: list[Manifest], base_list: DecodedList | None) -> DecodedList:
        data = encode_manifest_list([(manifest, None) for manifest in manifests], version=2, style=style, header={})
        return decode_list(data, "l", base_list)

    old_list = decode(old_manifests, None)
    added_manifest = make_manifest(rng)
    for position in (0, 20, 50):  # The new manifest is the first one, is between others, or is the last one.
        new_list = decode([*old_manifests[:position], added_manifest, *old_manifests[position:]], old_list)
        shared_ids = {id(manifest) for manifest in old_list.manifests} & {
            id(manifest) for manifest in new_list.manifests
        }
        # At most two neighbours of the new manifest are decoded again.
        assert len(shared_ids) >= len(old_manifests) - 2
