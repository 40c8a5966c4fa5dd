"""The `headrace` command with a model made of words instead of weights: run as a script, see `test_run`.

It answers "echo N: <the last message>", N being the number of messages, word by word; a raw prompt goes on with " and
so on". Words in the last message have it do things: `slow` waits between words, `broken` fails midway, `long` is
refused, `cut` ends at the length limit, `unicode` and `control` answer what terminals dislike.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.cli import engine
from headrace.cli.main import main
from headrace.engine.outputs import Chunk, CompletionOutput, RequestOutput
from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.scheduler.messages import Timings


class Stream(Iterator[Chunk]):
    def __init__(self, prompt: str, words: Sequence[str], params: SamplingParams) -> None:
        self.words = list(words)
        self.slow = "slow" in prompt
        self.broken = "broken" in prompt
        self.length = "cut" in prompt
        choice = CompletionOutput(0)
        seed = params.seed if params.seed is not None else 4711
        self.output = RequestOutput("req-1", prompt, list(range(len(prompt.split()))), [choice], seed)

    def __next__(self) -> Chunk:
        choice = self.output.outputs[0]
        if choice.finish_reason is not None:
            raise StopIteration
        if self.slow:
            time.sleep(0.15)
        if self.broken and len(choice.token_ids) == 1:
            return Chunk("req-1", 0, "", finish_reason="error", error="the logits are\nnot finite")
        text = self.words.pop(0)
        choice.text += text
        choice.token_ids.append(100 + len(choice.token_ids))
        if not self.words:
            choice.finish_reason = "length" if self.length else "stop"
            choice.timings = Timings(queued_s=0.1, first_token_s=0.25, total_s=0.25 + 0.1 * (len(choice.token_ids) - 1))
        return Chunk("req-1", 0, text, (choice.token_ids[-1],), finish_reason=choice.finish_reason)

    def close(self) -> None:
        log("close")


class Model:
    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(chat_template=None if "bare" in sys.argv[2] else "{{ messages }}")
        suggested = 0.3 if "cool" in sys.argv[2] else None
        generation = SimpleNamespace(temperature=suggested)
        self.model = SimpleNamespace(checkpoint=SimpleNamespace(generation=generation))

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> Stream:
        log(f"chat {[m['role'] + '=' + m['content'] for m in messages]} {params}")
        last = messages[-1]["content"]
        if "long" in last:
            raise RequestError("the prompt has 9 tokens, the context holds 8", "messages")
        if "unicode" in last:
            return Stream(last, ["caf", "é ", "模型", "\N{GRINNING FACE}"], params)
        if "control" in last:
            return Stream(last, ["a\x1b[2J\x9b", "b\tc\n", "d\r\x07"], params)
        words = f"echo {len(messages)}: {last}".split(" ")
        return Stream(last, [words[0], *(f" {w}" for w in words[1:])], params)

    def stream(self, prompt: str, params: SamplingParams) -> Stream:
        log(f"raw {prompt!r} {params}")
        return Stream(prompt, [" and", " so", " on"], params)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        log("end")


def log(line: str) -> None:
    if path := os.environ.get("STAND_IN_LOG"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def open_llm(model: str, options: dict[str, Any]) -> Model:
    log(f"open {model} {options}")
    return Model()


if __name__ == "__main__":
    engine.open_llm = open_llm  # type: ignore[assignment]
    main()
