"""Tests of key ownership: shares follow the weights, and a change of the nodes moves only the share of the changed
node.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from seamark.cache.rendezvous import Rendezvous

KEYS = [f"s3://lake/w/t/metadata/{number:06d}.avro" for number in range(20)]
NODES = st.dictionaries(
    st.text(min_size=1, max_size=12), st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=1, max_size=12
)


@given(NODES, st.text(min_size=1, max_size=12), st.sampled_from((0.5, 1.0, 4.0)))
def test_joining_node_takes_keys_but_no_key_moves_between_other_nodes(
    nodes: dict[str, float], joining_node: str, weight: float
) -> None:
    nodes.pop(joining_node, None)
    if not nodes:
        return
    old_nodes, new_nodes = Rendezvous(nodes), Rendezvous({**nodes, joining_node: weight})
    for key in KEYS:
        owner = new_nodes.rank(key)[0]
        assert owner == joining_node or [owner] == old_nodes.rank(key, 1)


@given(NODES)
def test_keys_of_a_leaving_node_go_to_their_substitutes(nodes: dict[str, float]) -> None:
    if len(nodes) < 2:
        return
    old_nodes = Rendezvous(nodes)
    removed_node = sorted(nodes)[0]
    new_nodes = Rendezvous({name: weight for name, weight in nodes.items() if name != removed_node})
    for key in KEYS:
        owner, substitute = old_nodes.rank(key)
        assert new_nodes.rank(key, 1) == [substitute if owner == removed_node else owner]


def test_shares_follow_the_weights() -> None:
    nodes = {"a": 1.0, "b": 1.0, "c": 2.0, "none": 0.0}
    rendezvous = Rendezvous(nodes)
    owned_counts = Counter(rendezvous.rank(f"key {number}", 1)[0] for number in range(20_000))
    for name, weight in nodes.items():
        assert abs(owned_counts[name] / 20_000 - weight / 4) < 0.015


def test_order_of_nodes_does_not_matter_and_ranks_have_distinct_nodes() -> None:
    names = [f"10.0.0.{number}:8183" for number in range(9)]
    rendezvous, other_rendezvous = (
        Rendezvous(dict.fromkeys(names, 1.0)),
        Rendezvous(dict.fromkeys(reversed(names), 1.0)),
    )
    for key in KEYS:
        ranks = rendezvous.rank(key, 20)
        assert ranks == other_rendezvous.rank(key, 20)
        assert sorted(ranks) == sorted(names)


def test_key_has_no_owner_without_nodes() -> None:
    assert Rendezvous({}).rank("key") == []
    assert Rendezvous({"a": 0.0, "b": -1.0}).rank("key") == []
