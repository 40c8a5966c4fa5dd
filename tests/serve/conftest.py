"""A live server over the scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.fake_llm import FakeLLM
from tests.serve.http_api import Api
from tests.serve.live_server import LiveServer


@pytest.fixture(scope="session")
def _served() -> Iterator[tuple[LiveServer, FakeLLM]]:
    llm = FakeLLM()
    with LiveServer(lambda: llm) as live:
        live.wait_ready()
        yield live, llm


@pytest.fixture
def api(_served: tuple[LiveServer, FakeLLM]) -> Iterator[Api]:
    live, llm = _served
    llm.reset()
    api = Api(live, llm)
    yield api
    api.still_serves()
    api.http.close()
