"""Rope frequencies from their formulas; transformers' own values are in the golden logits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvloom.errors import UnsupportedModelError
from kvloom.models.rope import RopeFields, build_rope, read_max_model_len
from kvloom.ops.base import Rope

GGUF_FACTORS = "gguf.rope_factors"  # what the translation of a GGUF file calls them
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rope(head_size: int = 128, theta: float = 500000.0, **config: Any) -> Rope:
    fields = {"max_position_embeddings": 131072, "rope_theta": theta, **config}
    return build_rope(RopeFields.read(fields), head_size)


def plain(head_size: int = 128, theta: float = 500000.0) -> list[float]:
    return [1.0 / theta ** (2 * i / head_size) for i in range(head_size // 2)]


def test_default() -> None:
    assert rope(4, 100.0).inv_freq == pytest.approx((1.0, 0.1))
    assert rope(4, 100.0).attention_factor == 1.0
    assert rope(rope_scaling=None).inv_freq == pytest.approx(plain())
    no_theta = RopeFields.read({"max_position_embeddings": 64})
    assert build_rope(no_theta, 4).inv_freq == pytest.approx((1.0, 0.01))


def test_linear_stretches_every_frequency() -> None:
    scaled = rope(rope_scaling={"type": "linear", "factor": 2.5})
    assert scaled.inv_freq == pytest.approx([f / 2.5 for f in plain()])


def test_proportional_turns_the_first_pairs_alone() -> None:
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}
    assert rope(rope_scaling=scaling).inv_freq == pytest.approx(
        [f / 2.0 for f in plain()[:16]] + [0.0] * 48
    )


def test_llama3_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    frequencies = rope(rope_scaling=LLAMA31).inv_freq
    for new, old in zip(frequencies, plain(), strict=True):
        wavelength = 2 * math.pi / old
        if wavelength < 8192 / 4:
            assert new == pytest.approx(old)
        elif wavelength > 8192 / 1:
            assert new == pytest.approx(old / 8)
        else:
            assert old / 8 < new < old
    assert list(frequencies) == sorted(frequencies, reverse=True)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    scaled = rope(128, 1e6, rope_scaling=YARN)
    turns = [32768 * f / (2 * math.pi) for f in plain(128, 1e6)]
    for new, old, num_turns in zip(scaled.inv_freq, plain(128, 1e6), turns, strict=True):
        if num_turns > 32 * 1.3:  # one pair of slack: the bounds are rounded to pairs
            assert new == pytest.approx(old)
        elif num_turns < 1 / 1.3:
            assert new == pytest.approx(old / 4)
        else:
            assert old / 4 <= new <= old
    assert scaled.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factors() -> None:
    def factor(**settings: Any) -> float:
        return rope(rope_scaling=YARN | settings).attention_factor

    assert factor(attention_factor=0.7) == 0.7
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    )
    assert factor(factor=1.0) == 1.0


def test_yarn_without_a_factor_stretches_as_far_as_the_config_says() -> None:
    implied = rope(rope_scaling=YARN | {"factor": None})
    assert implied == rope(rope_scaling=YARN | {"factor": 131072 / 32768})


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 32.0],
    "original_max_position_embeddings": 4096,
}


def test_longrope_divides_by_one_set_for_all_requests() -> None:
    """The long set as soon as one request may outgrow the original length, else the short one."""

    def frequencies(longest: int | None) -> tuple[float, ...]:
        asked = {} if longest is None else {"kvloom.longest_request": longest}
        return rope(4, 100.0, rope_scaling=LONGROPE, **asked).inv_freq

    assert frequencies(None) == pytest.approx((1.0 / 2.0, 0.1 / 32.0))
    assert frequencies(4097) == frequencies(None)
    assert frequencies(4096) == pytest.approx((1.0, 0.1 / 1.5))
    never_long = rope(4, 100.0, rope_scaling=LONGROPE, max_position_embeddings=4096)
    assert never_long.inv_freq == frequencies(4096)


def test_longrope_attention_factors() -> None:
    """By the paper's formula, whichever set divides."""

    def factor(**changes: Any) -> float:
        own = {"kvloom.longest_request": changes.pop("longest", 8192)}
        return rope(4, rope_scaling=LONGROPE | changes, **own).attention_factor

    assert factor() == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert factor(longest=64) == factor()
    assert factor(factor=4.0) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(4096)))
    assert factor(factor=0.5) == 1.0
    assert factor(attention_factor=1.19) == 1.19


@pytest.mark.parametrize("value", [None, 2.0, "x", [1.0], [1.0, -1.0], [1.0, "x"]])
def test_factors_of_longrope_are_positive_numbers_one_per_pair(value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="long_factor"):
        rope(4, rope_scaling=LONGROPE | {"long_factor": value})


def test_factors_divide_and_llama3_is_a_set_of_factors() -> None:
    wanted = rope(rope_scaling=LLAMA31).inv_freq
    factors = [old / new for old, new in zip(plain(), wanted, strict=True)]
    scaled = rope(**{GGUF_FACTORS: factors})
    assert scaled.inv_freq == pytest.approx(wanted)
    with pytest.raises(UnsupportedModelError, match="64 rope frequencies, but 3 factors"):
        rope(**{GGUF_FACTORS: [1.0, 1.0, 1.0]})
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UnsupportedModelError, match="positive numbers"):
            rope(**{GGUF_FACTORS: [factor] * 64})


@pytest.mark.parametrize("scaling", [LLAMA31, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_both_spellings_mean_the_same(scaling: dict[str, Any]) -> None:
    old = rope(rope_scaling=scaling)
    new = RopeFields.read(
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {**scaling, "rope_theta": 500000.0},
        }
    )
    assert build_rope(new, 128) == old
    outside = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
    original = scaling.get("original_max_position_embeddings")
    assert rope(rope_scaling=outside, original_max_position_embeddings=original) == old


def test_longest_context() -> None:
    def longest(**config: Any) -> int:
        return read_max_model_len({"max_position_embeddings": 40960, **config})

    assert longest() == 40960
    assert longest(rope_scaling=LLAMA31) == 40960
    assert longest(rope_scaling={"type": "linear", "factor": 4.0}) == 40960
    assert longest(rope_scaling=YARN) == 131072
    assert longest(rope_scaling=YARN | {"factor": 1.0}) == 40960


@pytest.mark.parametrize("kind", ["dynamic", "factors", "mrope", "su"])
def test_unknown_kinds_are_refused_by_name(kind: str) -> None:
    for key in ("type", "rope_type"):
        with pytest.raises(UnsupportedModelError, match=f"rope kind '{kind}' is not supported"):
            rope(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_settings_are_refused_by_name(missing: str) -> None:
    settings = {k: v for k, v in LLAMA31.items() if k != missing}
    with pytest.raises(UnsupportedModelError, match=f"{missing} should be a finite number above 0"):
        rope(rope_scaling=settings)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", ["x", NAN, INF, 10**400, -1, 0, 1, True, [10.0]])
def test_a_base_is_a_finite_number_above_one(value: Any) -> None:
    """At 1 all pairs turn alike and yarn's logarithm is 0; below 0 frequencies are complex."""
    for config in ({"rope_theta": value}, {"rope_parameters": {"rope_theta": value}}):
        with pytest.raises(UnsupportedModelError, match=r"rope_theta should be .* above 1, not"):
            rope(**config)


@pytest.mark.parametrize("value", ["foo", [1], 3, True])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_settings_are_an_object(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} should be an object, not"):
        rope(**{name: value})


@pytest.mark.parametrize("value", ["x", NAN, INF, -2.0, 0, True, [2.0]])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_type": "linear"}, "factor"),
        *((LLAMA31, name) for name in ("factor", "low_freq_factor", "high_freq_factor")),
        *((YARN, name) for name in ("factor", "beta_fast", "beta_slow", "attention_factor")),
    ],
)
def test_settings_are_positive_numbers(settings: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} should be a finite number above 0"):
        rope(rope_scaling=settings | {name: value})


@pytest.mark.parametrize("value", ["x", 0, -4, 2.5, True])
def test_the_original_length_is_a_positive_integer(value: Any) -> None:
    name = "original_max_position_embeddings"
    for config in ({"rope_scaling": YARN | {name: value}}, {"rope_scaling": YARN, name: value}):
        with pytest.raises(UnsupportedModelError, match=f"{name} should be a positive integer"):
            rope(**config)


def test_equal_bounds_of_llama3_leave_nothing_to_blend() -> None:
    """As in Llama 4 Scout: each frequency is kept or divided."""
    scaling = LLAMA31 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    kept = 0
    for scaled, plain in zip(rope(rope_scaling=scaling).inv_freq, rope().inv_freq, strict=True):
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        assert scaled == (plain if turns > 1 else plain / scaling["factor"])
        kept += scaled == plain
    assert 0 < kept < len(rope().inv_freq)


def test_settings_that_exclude_each_other_are_refused() -> None:
    """Between the two bounds llama3 blends, so that they have an order."""
    with pytest.raises(UnsupportedModelError, match=r"low_freq_factor 5.0 should not be above"):
        rope(rope_scaling=LLAMA31 | {"low_freq_factor": 5.0})
    with pytest.raises(UnsupportedModelError, match="truncate should be true or false"):
        rope(rope_scaling=YARN | {"truncate": "no"})


def test_the_kinds_that_are_named_are_those_a_config_can_have() -> None:
    known = "default, linear, proportional, llama3, yarn, longrope"
    with pytest.raises(UnsupportedModelError, match=f"knows {known}$"):
        rope(rope_scaling={"rope_type": "factors"})
