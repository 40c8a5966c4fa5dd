"""The official Python client against the scripted model, and its errors."""

from __future__ import annotations

import openai
import pytest

from tests.serve.client_checks import (
    TALK,
    client_of,
    echoes_with_logprobs,
    stops_at_a_string,
    streams_a_chat,
    streams_a_completion,
    streams_choices_with_logprobs,
)
from tests.serve.fake_llm import Script
from tests.serve.http_api import Api


def test_official_client(api: Api) -> None:
    client = client_of(api.url)
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").id == "fake-model"
    text = streams_a_chat(client, "fake-model")
    streams_a_completion(client, "fake-model")
    streams_choices_with_logprobs(client, "fake-model")
    stops_at_a_string(client, "fake-model", text)
    for prompt in ("\n2. A farm with 15", "中文 😀"):
        echoes_with_logprobs(client, "fake-model", prompt)


def test_official_client_sees_errors(api: Api) -> None:
    client = client_of(api.url)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake-model", messages=TALK, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=TALK)
    assert unknown.value.code == "model_not_found"
    api.llm.script = lambda prompt, choice: Script([120] * 9, 0.0, fails_after=2)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.chat.completions.create(model="fake-model", messages=TALK, stream=True))
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.chat.completions.create(model="fake-model", messages=TALK)
