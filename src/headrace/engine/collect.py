"""Turns the engine's deltas into what the Python API returns. Knows the tokenizer's pieces, no threads, no queues."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.outputs import Chunk, CompletionOutput, Logprob, Logprobs, RequestOutput
from headrace.execute.plan import TokenLogprob
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta
from headrace.tokenize.tokenizer import Tokenizer


class Collector:
    """One request's answer, as far as it has come."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        assert params.seed is not None, "admission draws a seed"
        self._tokenizer = tokenizer
        self._wants_logprobs = params.logprobs is not None
        wants_prompt = params.prompt_logprobs is not None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_ids,
            outputs=[CompletionOutput(i, logprobs=[] if self._wants_logprobs else None) for i in range(params.n)],
            seed=params.seed,
            prompt_logprobs=[] if wants_prompt else None,
        )

    def add(self, delta: Delta) -> Chunk | None:
        """Take one delta in. The chunk that a stream shows for it; None where it brought nothing to show."""
        choice = self.output.outputs[delta.choice]
        logprobs = self._logprobs(delta) if self._wants_logprobs else None
        if self.output.prompt_logprobs is not None and delta.choice == 0:
            self.output.prompt_logprobs += [
                None if p is None else self._position(p, None) for p in delta.prompt_logprobs
            ]
        self.output.embedding = delta.embedding or self.output.embedding
        choice.text += delta.text
        choice.token_ids += delta.tokens
        choice.pieces += delta.pieces
        if choice.logprobs is not None:
            choice.logprobs += logprobs or []
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(p.logprob for p in delta.logprobs)
        if delta.finish is not None:
            choice.finish_reason, choice.stop_reason = delta.finish, delta.stop_reason
            choice.error, choice.timings = delta.error, delta.timings
            self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)
        if not delta.tokens and not delta.text and delta.finish is None:
            return None
        return Chunk(
            request_id=self.output.request_id,
            index=delta.choice,
            text=delta.text,
            token_ids=delta.tokens,
            pieces=delta.pieces,
            logprobs=logprobs,
            finish_reason=delta.finish,
            stop_reason=delta.stop_reason,
            error=delta.error,
            timings=delta.timings,
            at=delta.at,
        )

    def _logprobs(self, delta: Delta) -> Logprobs:
        pieces: Iterable[str | None] = delta.pieces or [None] * len(delta.logprobs)
        return [self._position(p, piece) for p, piece in zip(delta.logprobs, pieces, strict=False)]

    def _position(self, position: TokenLogprob, piece: str | None) -> dict[int, Logprob]:
        out = {position.token: Logprob(position.logprob, position.rank, piece or self._text(position.token))}
        for rank, (token, logprob) in enumerate(position.top, 1):
            out.setdefault(token, Logprob(logprob, rank, self._text(token)))
        return out

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")
