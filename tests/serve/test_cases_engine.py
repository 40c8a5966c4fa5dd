"""S1, S3 and V6 through the whole engine and over HTTP, the text forced token by token: what goes out, and when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from headrace.engine import async_llm
from headrace.tokenize.tokenizer import Tokenizer
from tests.serve.fake_llm import VOCAB, FakeLLM, Script
from tests.serve.http_api import COMPLETIONS, Api, events_of
from tests.serve.live_server import LiveServer, until
from tests.serve.test_engine_path import Scripted, loaded
from tests.serve.test_text import both
from tests.tokenize.made import pieces

CHARS = "😀霓é👩‍👩‍👧"


@contextlib.contextmanager
def serving(fake: FakeLLM) -> Iterator[tuple[Api, async_llm.AsyncLLM]]:
    kept: list[async_llm.AsyncLLM] = []

    def load() -> async_llm.AsyncLLM:
        kept.append(async_llm.AsyncLLM("scripted"))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "load", lambda model, *, deliver, **_: loaded(fake, deliver))
        with LiveServer(load) as live:
            api = Api(live.wait_ready(), fake)
            yield api, kept[0]
            api.http.close()


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Api, async_llm.AsyncLLM]]:
    with serving(FakeLLM()) as served:
        yield served


@pytest.fixture
def real(made: tuple[Api, async_llm.AsyncLLM]) -> Iterator[Api]:
    api, llm = made
    api.llm.reset()
    yield api
    api.still_serves()
    assert (llm.stats().running, llm.stats().waiting, llm.stats().blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("says", "stop", "shown", "reason"),
    [
        ("MONDAYTUESDAY", ["DAYTUE"], "MON", "DAYTUE"),
        ("MONDAYT", ["DAYTUE"], "MONDAYT", None),
        ("MONDAYTUESDAY", ["TUES", "AYT"], "MOND", "AYT"),
        ("MONDAYTUESDAY", ["AYT", "TUES"], "MOND", "AYT"),
        ("MONDAYTUESDAY", ["SDAY", "NDA"], "MO", "NDA"),
        ("hello world", ["lo", "el"], "h", "el"),
        ("MONDAYTUESDAY", [], "MONDAYTUESDAY", None),
        ("MONDAYTUESDAY", None, "MONDAYTUESDAY", None),
        ("MONDAYTUESDAY", ["v", "w", "x", "y", "z"], "MONDAYTUESDAY", None),
        ("MONDAYTUESDAY", ["v", "w", "x", "y", "TUE"], "MONDAY", "TUE"),
        ("MONDAYTUESDAY", [*"bcdefghijklmnop", "TUE"], "MONDAY", "TUE"),
    ],
)
@pytest.mark.parametrize("letters", [False, True], ids=["pieces", "letters"])
def test_s1_v6_stop_strings(real: Api, says: str, stop: Any, shown: str, reason: str | None, letters: bool) -> None:
    if letters:
        real.llm.script = lambda prompt, choice: Script(list(says.encode()))
    else:
        real.llm.says(says)
    choice = both(real, stop=stop, max_tokens=50)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", reason)


def test_s1_held_text_goes_out_where_the_length_ends_it(real: Api) -> None:
    real.llm.says("MONDAYTUESDAY")
    for most, shown in ((1, "MON"), (2, "MONDAY"), (3, "MON")):
        choice = both(real, stop=["DAYTUE"], max_tokens=most)
        assert (choice["text"], choice["finish_reason"]) == (shown, "stop" if most == 3 else "length")


def test_s3_every_character_goes_out_with_its_last_byte(real: Api) -> None:
    real.llm.says(CHARS)
    parts = [event["choices"][0] for event in real.complete_events(max_tokens=100, logprobs=0)]
    told = [(part["text"], len(part["logprobs"]["tokens"])) for part in parts if part["text"]]
    assert told == [(char, len(char.encode())) for char in CHARS], "none waits for the token behind it"


@pytest.mark.parametrize("most", range(1, 21))
def test_s3_cut_at_every_byte(real: Api, most: int) -> None:
    real.llm.says(CHARS)
    choice = both(real, max_tokens=most)
    assert choice["text"] == CHARS.encode()[:most].decode(errors="ignore")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("file", ["made", "gemma3-270m"])
def test_s3_byte_fallback(file: str, test_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of single bytes of a SentencePiece vocabulary; Gemma's own where the file is there."""
    if file == "made":
        tokenizer = Tokenizer.from_gguf(pieces(("\u2581hi",)))
    else:
        from headrace.loading.gguf import GGUF

        path = test_model(file)
        tokenizer = Tokenizer.from_gguf(GGUF(path).metadata, path=path)
    by_piece = {tokenizer.piece(token): token for token in reversed(range(600)) if len(tokenizer.piece(token)) == 1}
    tokens = [by_piece[bytes([byte])] for byte in CHARS.encode()]
    fake = FakeLLM()
    monkeypatch.setattr(fake, "tokenizer", tokenizer)
    fake.script = lambda prompt, choice: Script(tokens)
    with serving(fake) as (api, _):
        for most in range(1, 21):
            body = {"prompt": [5, 6], "max_tokens": most, "ignore_eos": True}
            whole = api.complete(**body).json()["choices"][0]["text"]
            parts = [event["choices"][0]["text"] for event in api.complete_events(**body)]
            assert whole == "".join(parts) == CHARS.encode()[:most].decode(errors="ignore")
            assert all(len(part) <= 1 for part in parts)


def test_s3_leaving_inside_a_character(
    made: tuple[Api, async_llm.AsyncLLM], real: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one request leaves half said is in nobody else's text."""
    llm, run = made[1], Scripted.run
    monkeypatch.setattr(Scripted, "run", lambda self, plan, masks=None: (time.sleep(0.002), run(self, plan))[1])
    half = [*"😀".encode()[:2], *[VOCAB - 1] * 400]  # tokens without text: the character stays open
    real.llm.script = lambda prompt, choice: Script(half if prompt[0] == 9 else list(CHARS.encode()))
    aborts = llm.stats().aborts
    for _ in range(3):
        said = llm.stats().tokens_out
        with httpx.stream("POST", real.url + COMPLETIONS, json={"prompt": [9], "stream": True, "max_tokens": 400}):
            until(lambda said=said: llm.stats().tokens_out > said + 4)
        other = real.http.post(COMPLETIONS, json={"prompt": [8], "stream": True, "max_tokens": 50})
        assert "".join(event["choices"][0]["text"] for event in events_of(other)) == CHARS
    until(lambda: not llm.stats().running)
    assert llm.stats().aborts == aborts + 3
