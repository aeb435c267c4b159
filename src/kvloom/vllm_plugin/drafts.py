"""Drafts for vLLM's next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.outputs import DraftTokenIds

from kvloom.sched.drafts import DraftProposer
from kvloom.vllm_plugin.steps import KnownRequest


class Drafter:
    """Proposes drafts behind the tokens of each step; vLLM asks for them when the step is over."""

    def __init__(self, proposer: DraftProposer, num_draft_tokens: int) -> None:
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self._drafts: dict[str, list[int]] = {}

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests have ended."""
        for req_id in req_ids:
            self._proposer.forget(req_id)

    def propose(self, sampled: Mapping[str, list[int]], known: Mapping[str, KnownRequest]) -> None:
        """Guess what follows the tokens that a step sampled."""
        self._drafts = {}
        for req_id, token_ids in sampled.items():
            text = known[req_id].token_ids
            text += token_ids
            self._drafts[req_id] = self._proposer.propose(req_id, text, self._num_draft_tokens)

    def take(self) -> DraftTokenIds:
        """The proposals of the last step."""
        drafts, self._drafts = self._drafts, {}
        return DraftTokenIds(list(drafts), list(drafts.values()))
