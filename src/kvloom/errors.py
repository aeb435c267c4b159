"""kvloom's errors. Every message says what is wrong and what to do about it.

KvloomError
├── ConfigError                an option, or a combination of options, cannot work
│   └── ParallelSizeError      the tensor-parallel size does not divide the model's heads
├── ModelError                 the model's files are not usable
│   ├── ModelNotFoundError     the reference names no model that can be had here
│   ├── UnsupportedModelError  an architecture, rope kind or file type we do not run
│   └── WeightsError           a missing, left-over, truncated or misshaped tensor
├── CapacityError              there is not enough memory for what was asked
├── UnavailableError           the engine takes no requests: it is not ready, or shutting down
└── RequestError               one request is not valid; names the field (HTTP 400)
"""

from __future__ import annotations


class KvloomError(Exception):
    """Base of everything kvloom raises on purpose."""


class ConfigError(KvloomError):
    """An option, or a combination of options, cannot work."""


class ParallelSizeError(ConfigError):
    """The tensor-parallel size does not fit the model's heads; the message lists those that do."""


class ModelError(KvloomError):
    """The model's files are not usable."""


class ModelNotFoundError(ModelError):
    """The model reference names nothing that can be had here."""


class UnsupportedModelError(ModelError):
    """An architecture, rope kind, tensor type or file type that kvloom does not run."""


class WeightsError(ModelError):
    """A tensor is missing, left over, truncated or of the wrong shape; the message names it."""


class CapacityError(KvloomError):
    """There is not enough memory; the message holds the arithmetic and what would fit."""


class UnavailableError(KvloomError):
    """The engine takes no requests now: it is not ready yet, or shutting down."""


class RequestError(KvloomError):
    """One request is not valid. `field` names the offending parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
