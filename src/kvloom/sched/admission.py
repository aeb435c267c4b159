"""What a scheduler refuses to take, and what it says of it."""

from __future__ import annotations

from kvloom.errors import RequestError
from kvloom.kv.manager import KVCacheManager
from kvloom.request import Request


def check_new_request(request: Request, kv: KVCacheManager, max_model_len: int) -> None:
    """Refuse a request that could never run to an end.

    Raises:
        RequestError: its prompt is empty, leaves no room for a token, or can never fit the cache.
    """
    num_tokens = request.num_tokens
    if num_tokens == 0:
        raise RequestError("prompt", "it is empty; give at least one token")
    if num_tokens >= max_model_len:
        raise RequestError(
            "prompt",
            f"its {num_tokens} tokens leave no room for output in max_model_len {max_model_len}; "
            f"shorten it to {max_model_len - 1} tokens",
        )
    if not kv.can_ever_fit(num_tokens):
        raise RequestError("prompt", too_large(kv, num_tokens, "shorten the prompt"))


def too_large(kv: KVCacheManager, num_tokens: int, remedy: str) -> str:
    """Why `num_tokens` tokens of one request never fit."""
    return (
        f"{num_tokens} tokens need more blocks than the KV cache has "
        f"({kv.stats.num_usable_blocks} of {kv.block_size} tokens); {remedy}, "
        "or give the cache more memory"
    )
