"""What the official client must be able to do against any live server; run on the scripted model and on a real one."""

from __future__ import annotations

from openai import OpenAI

TALK = [{"role": "user", "content": "Count from one to five in words."}]


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def streams_a_chat(client: OpenAI, model: str) -> str:
    """Streamed equals whole; roles, ids, finish reasons and usage as the reference says."""
    how = {"model": model, "messages": TALK, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**how)
    assert whole.usage is not None
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens in (0, last.usage.prompt_tokens - 1), "asked a moment ago"
    assert last.usage.model_copy(update={"prompt_tokens_details": whole.usage.prompt_tokens_details}) == whole.usage
    assert all(part.usage is None for part in parts)
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.choices[0].message.role == "assistant"
    assert whole.object == "chat.completion"
    assert len({part.id for part in chunks}) == 1
    assert text
    return text


def streams_a_completion(client: OpenAI, model: str) -> str:
    how = {"model": model, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**how)
    parts = list(client.completions.create(**how, stream=True))
    text = "".join(part.choices[0].text for part in parts)
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12
    assert whole.object == "text_completion"
    assert text
    return text


def streams_choices_with_logprobs(client: OpenAI, model: str) -> None:
    """n=2: each choice's tokens are its text, bytes too; a seed gives the same answers again."""
    how = {
        "model": model,
        "messages": TALK,
        "max_tokens": 12,
        "n": 2,
        "seed": 11,
        "temperature": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**how)
    texts, tokens = ["", ""], [[], []]
    for part in client.chat.completions.create(**how, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content:
                tokens[choice.index] += choice.logprobs.content
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert texts[choice.index] == choice.message.content
        assert tokens[choice.index] == choice.logprobs.content
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert joined.decode(errors="ignore") == choice.message.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= 0
            ranked = [top.logprob for top in entry.top_logprobs]
            assert ranked == sorted(ranked, reverse=True)
    again = client.chat.completions.create(**how)
    assert [c.message.content for c in again.choices] == [c.message.content for c in whole.choices]


def stops_at_a_string(client: OpenAI, model: str, text: str) -> None:
    """`text` is what streams_a_chat gave; the stop is its middle, across tokens."""
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    how = {"model": model, "messages": TALK, "max_tokens": 16, "temperature": 0, "stop": [stop, "never in it"]}
    parts = list(client.chat.completions.create(**how, stream=True))
    got = "".join(part.choices[0].delta.content or "" for part in parts)
    assert got == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def echoes_with_logprobs(client: OpenAI, model: str, prompt: str) -> None:
    """S4 through the client."""
    how = {"model": model, "prompt": prompt, "max_tokens": 5, "temperature": 0, "logprobs": 1, "echo": True}
    choice = client.completions.create(**how).choices[0]
    assert choice.logprobs is not None
    logprobs = choice.logprobs
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert choice.text.startswith(prompt)
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert logprobs.token_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.top_logprobs)
    parts = [part.choices[0] for part in client.completions.create(**how, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    assert [t for part in parts for t in (part.logprobs.tokens or [])] == logprobs.tokens
    assert [t for part in parts for t in (part.logprobs.text_offset or [])] == logprobs.text_offset
