"""The number formats kvloom stores, with the only rule that turns value counts into bytes."""

from __future__ import annotations

from enum import Enum

from kvloom.errors import ConfigError

_INT8_GROUP = 32
_INT8_GROUP_BYTES = 34  # 32 int8 values and one bf16 scale


class DType(Enum):
    """A storage format. The value is the name users write and configs hold."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"  # a byte per value, no scales; for plans: no backend computes with it
    INT8 = "int8"

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` adjacent values take, scales included.

        int8 is stored in groups of 32 values with one bf16 scale: 34 bytes per group.

        Raises:
            ConfigError: `num_values` is not a whole number of int8 groups.
        """
        if self is DType.INT8:
            if num_values % _INT8_GROUP:
                raise ConfigError(
                    f"int8 comes in groups of {_INT8_GROUP}; {num_values} values do not divide, "
                    "choose bfloat16 or a head size that is a multiple of 32"
                )
            return num_values // _INT8_GROUP * _INT8_GROUP_BYTES
        return num_values * _VALUE_BYTES[self]

    @classmethod
    def parse(cls, name: object) -> DType:
        """The dtype named `name` ("float32", "bfloat16", ...; a leading "torch." is dropped).

        Raises:
            ConfigError: no such dtype; the message lists those there are.
        """
        plain = name.removeprefix("torch.") if isinstance(name, str) else None
        for dtype in cls:
            if dtype.value == plain:
                return dtype
        known = ", ".join(dtype.value for dtype in cls)
        raise ConfigError(f"unknown dtype {name!r:.80}; choose one of {known}")


_VALUE_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FP8: 1}
