"""One answer on the command line: asks the engine, hands the text on as it comes, and says how fast it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.engine.outputs import RequestOutput

Conversation = Sequence[dict[str, str]]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while an answer was coming; the request is aborted. `output` has what came before."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output


class Asker:
    """Asks one model always with the same parameters."""

    def __init__(self, llm: LLM, params: SamplingParams, *, raw: bool) -> None:
        self.llm = llm
        self.params = params
        self.raw = raw
        """Complete the last message's text instead of answering the conversation."""

    def ask(self, conversation: Conversation, write: Callable[[str], None]) -> RequestOutput:
        """The whole answer, handed to `write` as it comes.

        RequestError where the engine refuses it, `Interrupted` on Ctrl-C, HeadraceError where it fails midway.
        """
        if self.raw:
            stream = self.llm.stream(conversation[-1]["content"], self.params)
        else:
            stream = self.llm.stream_chat(conversation, self.params)
        try:
            for chunk in stream:
                if chunk.error is not None:
                    raise HeadraceError(chunk.error)
                if chunk.text:
                    write(chunk.text)
        except KeyboardInterrupt:
            raise Interrupted(stream.output) from None
        finally:
            stream.close()
        return stream.output


def tokens_per_s(output: RequestOutput) -> float | None:
    """Speed after the first token; None where there are not two tokens to measure."""
    [choice] = output.outputs
    if choice.timings is None or len(choice.token_ids) < 2:
        return None
    seconds = choice.timings.total_s - choice.timings.first_token_s
    return (len(choice.token_ids) - 1) / seconds if seconds > 0 else None


def figures(output: RequestOutput) -> str:
    """One line about an answer."""
    [choice] = output.outputs
    speed = tokens_per_s(output)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens"]
    if choice.timings is not None and choice.token_ids:
        parts.append(f"first token {choice.timings.first_token_s:.2f} s")
    parts.append(f"{len(choice.token_ids)} token{'s' * (len(choice.token_ids) != 1)}")
    parts.append(f"{speed:.1f} tokens/s" if speed is not None else "tokens/s not measured")
    if choice.finish_reason == "length":
        parts.append("cut at the length limit")
    return " · ".join(parts)
