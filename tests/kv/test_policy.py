from __future__ import annotations

import random

import pytest

from kvloom.errors import ConfigError
from kvloom.kv.policy import NEVER, POLICIES, make_policy
from kvloom.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)
from visibility import Kind, joint_hit

KINDS = [
    Kind("full", 4),
    Kind("latent", 2),
    *(Kind("window", block_size, size) for block_size in (1, 4) for size in (1, 2, 4, 7, 33)),
    *(Kind("chunk", block_size, size) for block_size in (1, 4) for size in (1, 2, 6, 8, 33)),
]
NUM_TOKENS = 80


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_seen_follows_the_definition(kind):
    policy = make_policy(kind.spec)
    for position in range(NUM_TOKENS):
        seen = [key for key in range(NUM_TOKENS) if kind.sees(position, key)]
        assert policy.first_visible_token(position) == seen[0]
        assert policy.first_visible_column(position) == seen[0] // kind.block_size
        blind = (
            query for query in range(position, 3 * NUM_TOKENS) if not kind.sees(query, position)
        )
        assert policy.first_blind_position(position) == next(blind, NEVER)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_longest_hit_is_the_first_of_all_lengths_that_will_do(kind):
    policy = make_policy(kind.spec)
    rng = random.Random(str(kind))
    lengths = set()
    for _ in range(300):
        share = rng.choice([0.0, 0.5, 0.9, 1.0])
        cached = {c for c in range(NUM_TOKENS // kind.block_size) if rng.random() < share}
        num_tokens = rng.randrange(NUM_TOKENS)
        # Another group may ask for longer steps.
        other = Kind("window", kind.block_size * rng.choice([1, 1, 2, 3]), 1)
        asked = []

        def is_cached(column, cached=cached, asked=asked):
            asked.append(column)
            return column in cached

        hit = policy.longest_hit(is_cached, num_tokens, other.block_size)
        brute = joint_hit(
            [kind, other], num_tokens + 1, lambda group, c, cached=cached: group == 1 or c in cached
        )
        assert hit == brute
        assert len(asked) == len(set(asked))
        lengths.add(hit)
    assert len(lengths) > 3


def test_a_cold_prompt_costs_one_question_per_window():
    policy = make_policy(Kind("window", 1, 10).spec)
    asked = []
    assert policy.longest_hit(asked.append, 90, 1) == 0  # append answers None: nothing is cached
    assert asked == [*range(81, 0, -9), 0]


def test_every_kind_that_stores_has_a_policy():
    assert set(POLICIES) == {
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
    }
    with pytest.raises(ConfigError, match=r"SharedKVSpec.*FullAttentionSpec"):
        make_policy(SharedKVSpec(block_size=4, target="layers.0"))
