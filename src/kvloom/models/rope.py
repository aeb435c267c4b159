"""Rotary frequencies from a model's config, for both spellings Hugging Face configs have.

Formulas: default (RoFormer, arXiv 2104.09864), linear (position interpolation, arXiv 2306.15595),
yarn (arXiv 2309.00071, section 3), longrope (arXiv 2402.13753), llama3 (the Llama 3.1 release,
which names no paper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvloom.errors import UnsupportedModelError
from kvloom.models.fields import read_bool, read_float, read_floats, read_int, read_mapping
from kvloom.ops.base import Rope

_DEFAULT_THETA = 10000.0
# Only the translation of a GGUF file makes this field; no config.json has it.
GGUF_FACTORS = "gguf.rope_factors"
# Nor this one, which the registry adds: the longest request that the user asked for.
LONGEST_REQUEST = "kvloom.longest_request"


@dataclass(frozen=True, slots=True)
class RopeFields:
    """A config's rope settings in one spelling.

    Attributes:
        kind: a key of `_KINDS`.
        settings: what the kind needs besides.
        original_max_len: context length the model was trained on, before any scaling.
        longest_request: tokens of the longest request there may be.
        factors: of a GGUF file: one divisor per frequency, instead of a kind.
    """

    kind: str
    theta: float
    settings: Mapping[str, Any]
    max_position_embeddings: int
    original_max_len: int
    longest_request: int
    factors: Sequence[float] | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> RopeFields:
        """From `rope_scaling` and `rope_theta`, or from transformers 5's `rope_parameters`.

        Raises:
            UnsupportedModelError: a rope of another kind, or one that covers part of a head.
        """
        settings = _read_settings(config)
        kind = str(settings.get("rope_type", settings.get("type", "default")))
        if any(isinstance(value, Mapping) for value in settings.values()):
            kind = "per layer type"
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"rope kind {kind!r} is not supported; kvloom knows {', '.join(_KINDS)}"
            )
        for holder in (settings, config):
            if kind != "proportional" and holder.get("partial_rotary_factor") not in (None, 1):
                raise UnsupportedModelError(
                    f"partial_rotary_factor {holder['partial_rotary_factor']} is not part of this "
                    "model family; remove it from the config if the checkpoint was made without"
                )
        max_len = read_int(config, "max_position_embeddings")
        length = "original_max_position_embeddings"
        original = read_int(config, length, read_int(settings, length, max_len))
        theta = read_float(config, "rope_theta", _DEFAULT_THETA, above=1.0)
        theta = read_float(settings, "rope_theta", theta, above=1.0)
        longest = config.get(LONGEST_REQUEST, max_len)
        return cls(kind, theta, settings, max_len, original, longest, config.get(GGUF_FACTORS))

    def number(self, name: str, default: float | None = None) -> float:
        """The setting `name`, a positive number.

        Raises:
            UnsupportedModelError: it is missing without a default, or no positive number.
        """
        return read_float(self.settings, name, default)

    @property
    def stretch(self) -> float:
        """How far a kind stretches the context; without a factor, as far as the config says."""
        return self.number("factor", self.max_position_embeddings / self.original_max_len)


def read_max_model_len(config: Mapping[str, Any]) -> int:
    """The longest context; yarn configs may keep the length before stretching.

    Raises:
        UnsupportedModelError: the length is missing or malformed.
    """
    max_len = read_int(config, "max_position_embeddings")
    settings = _read_settings(config)
    if settings.get("rope_type", settings.get("type")) != "yarn":
        return max_len
    fields = RopeFields.read(config)
    return max(max_len, int(fields.original_max_len * fields.stretch))


def _read_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return read_mapping(config, "rope_scaling") or read_mapping(config, "rope_parameters")


def read_rotations(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer rotates: `no_rope_layers` has a 1 where it does, else all but every n-th.

    Raises:
        UnsupportedModelError: not a 0 or 1 for each layer.
    """
    num_layers = read_int(config, "num_hidden_layers")
    flags = config.get("no_rope_layers")
    if not flags:
        interval = read_int(config, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or set(flags) - {0, 1}:
        raise UnsupportedModelError(
            f"no_rope_layers should be 0 or 1 for each of {num_layers} layers, not {flags!r:.80}"
        )
    return [bool(flag) for flag in flags[:num_layers]]


def build_rope(fields: RopeFields, head_size: int) -> Rope:
    """The scaled frequencies, one per pair of values in a head of `head_size`.

    Raises:
        UnsupportedModelError: a setting of the kind is missing or malformed.
    """
    if head_size % 2:
        raise UnsupportedModelError(f"rope rotates pairs, so head size {head_size} must be even")
    plain = [fields.theta ** (-2.0 * i / head_size) for i in range(head_size // 2)]
    if fields.factors is not None:
        return _divide(plain, fields.factors, "rope_freqs.weight")
    return _KINDS[fields.kind](fields, plain)


def _default(_: RopeFields, plain: list[float]) -> Rope:
    return Rope(tuple(plain))


def _linear(fields: RopeFields, plain: list[float]) -> Rope:
    factor = fields.number("factor")
    return Rope(tuple(f / factor for f in plain))


def _proportional(fields: RopeFields, plain: list[float]) -> Rope:
    """The first pairs turn, as many as the factor says; the others stay where they are."""
    num_turning = int(fields.number("partial_rotary_factor", 1.0) * len(plain))
    factor = fields.number("factor", 1.0)
    return Rope(tuple(f / factor if i < num_turning else 0.0 for i, f in enumerate(plain)))


def _divide(plain: list[float], factors: Sequence[float], name: str) -> Rope:
    if len(factors) != len(plain):
        raise UnsupportedModelError(
            f"the model's heads have {len(plain)} rope frequencies, but {len(factors)} factors"
            f" ({name})"
        )
    if not all(0.0 < factor < math.inf for factor in factors):
        raise UnsupportedModelError(
            f"the rope factors ({name}) should be positive numbers; fetch the file again"
        )
    return Rope(tuple(f / factor for f, factor in zip(plain, factors, strict=True)))


def _longrope(fields: RopeFields, plain: list[float]) -> Rope:
    """One set of divisors for contexts up to the original length, another for longer ones.

    Keys that are cached would be wrong for the other set, so that one serves all requests: the long
    one as soon as any request may outgrow the original length.
    """
    original = fields.original_max_len
    name = "long_factor" if fields.longest_request > original else "short_factor"
    rope = _divide(plain, read_floats(fields.settings, name), name)
    stretch = fields.stretch
    implied = math.sqrt(1.0 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
    return replace(rope, attention_factor=fields.number("attention_factor", implied))


def _llama3(fields: RopeFields, plain: list[float]) -> Rope:
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low > high:
        raise UnsupportedModelError(
            f"the config's low_freq_factor {low} should not be above its high_freq_factor {high}"
        )

    def scale(frequency: float) -> float:
        turns = fields.original_max_len * frequency / (2.0 * math.pi)
        if turns > high:
            return frequency
        if turns <= low:  # so that nothing lies between equal bounds
            return frequency / factor
        kept = (turns - low) / (high - low)
        return (1.0 - kept) * frequency / factor + kept * frequency

    return Rope(tuple(scale(f) for f in plain))


def _yarn(fields: RopeFields, plain: list[float]) -> Rope:
    factor = fields.stretch
    low, high = _yarn_ramp(fields, len(plain))

    def scale(i: int, frequency: float) -> float:
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        return stretched * frequency / factor + (1.0 - stretched) * frequency

    return Rope(
        tuple(scale(i, f) for i, f in enumerate(plain)), _yarn_attention_factor(fields, factor)
    )


def _yarn_ramp(fields: RopeFields, num_pairs: int) -> tuple[float, float]:
    """Pairs before the first bound keep their frequency, pairs after the second are stretched."""

    def pair_of(num_turns: float) -> float:
        wavelengths = fields.original_max_len / (num_turns * 2.0 * math.pi)
        return num_pairs * math.log(wavelengths) / math.log(fields.theta)

    low = pair_of(fields.number("beta_fast", 32.0))
    high = pair_of(fields.number("beta_slow", 1.0))
    if read_bool(fields.settings, "truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    return low, high if high != low else high + 0.001  # a step, without dividing by zero


def _yarn_attention_factor(fields: RopeFields, factor: float) -> float:
    if fields.settings.get("attention_factor") is not None:
        return fields.number("attention_factor")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if fields.settings.get("mscale") and fields.settings.get("mscale_all_dim"):
        return magnitude(fields.number("mscale")) / magnitude(fields.number("mscale_all_dim"))
    return magnitude(1.0)


_KINDS: dict[str, Callable[[RopeFields, list[float]], Rope]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
