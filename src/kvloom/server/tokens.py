"""POST /tokenize and /detokenize: what the model sees of a text, and back."""

from __future__ import annotations

from typing import Any

from kvloom.engine.async_llm import AsyncLLM
from kvloom.errors import KvloomError, RequestError
from kvloom.server.schema import DetokenizeRequest, TokenizeRequest
from kvloom.tokenizer import ChatOptions


async def tokenize(llm: AsyncLLM, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text or a conversation, as a completion or chat request would have them."""
    size = len(body.prompt or "") + sum(len(str(m.content)) for m in body.messages or ())
    ids = await llm.off_loop(size, lambda: _encode(llm, body))
    return {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids}


def _encode(llm: AsyncLLM, body: TokenizeRequest) -> list[int]:
    tokenizer = llm.tokenizer
    if body.prompt is not None:
        has_special = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt, add_special_tokens=has_special)
    options = ChatOptions(add_generation_prompt=body.add_generation_prompt is not False)
    messages = [message.for_template for message in body.messages or ()]
    if not messages:
        raise RequestError("messages", "empty; give at least one message")
    try:
        text = tokenizer.render_chat(messages, options)
    except RequestError:
        raise
    except KvloomError as error:
        raise RequestError("messages", str(error)) from error
    return tokenizer.encode(text, add_special_tokens=False)


async def detokenize(llm: AsyncLLM, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    for index, token_id in enumerate(body.tokens):
        if token_id >= llm.vocab_size:
            raise RequestError(
                f"tokens[{index}]", f"{token_id} is not within [0, {llm.vocab_size})"
            )
    text = await llm.off_loop(
        len(body.tokens), lambda: llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return {"prompt": text}
