"""Who may still join the queue. Owns the limits of admission and the count of those refused; knows no text, no HTTP.

Only for strangers who ask one by one (`AsyncLLM`, the server): whoever hands a list to `LLM` has chosen its length.
"""

from __future__ import annotations

import math
import threading

from headrace.errors import OverloadedError
from headrace.scheduler.scheduler import Stats

LONGEST_S = 60
"""The longest wait that a refused client is told, also where nothing was measured."""


class Gate:
    """At most `requests` choices, and at most `tokens` tokens of prompts, wait. An empty queue takes any one request:
    else one that is larger than a limit could never be served."""

    def __init__(self, requests: int, tokens: int) -> None:
        self._requests = requests
        self._tokens = tokens
        self._lock = threading.Lock()
        self.refused = 0
        """Choices, since the start."""

    def judge(self, requests: int, tokens: int, stats: Stats) -> None:
        """OverloadedError where so many more choices, of prompts of so many tokens together, may not wait now."""
        requests_over = stats.waiting + requests - self._requests
        tokens_over = stats.waiting_tokens + tokens - self._tokens
        if not stats.waiting or max(requests_over, tokens_over) <= 0:
            return
        with self._lock:
            self.refused += requests
        wait = max(_seconds(requests_over, stats.begin_rate), _seconds(tokens_over, stats.begin_token_rate))
        if requests_over > 0:
            full = f"{stats.waiting} requests wait, and {requests} more would be above queue_requests, {self._requests}"
        else:
            full = f"{stats.waiting_tokens} tokens wait, and {tokens} more would be above queue_tokens, {self._tokens}"
        retry_s = min(max(1, math.ceil(wait)), LONGEST_S)
        raise OverloadedError(f"the queue is full: {full}; try again in {retry_s} s", retry_s)


def _seconds(over: int, rate: float) -> float:
    """Until so many have left the queue, and no more than that came."""
    if over <= 0:
        return 0.0
    return min(over / rate, LONGEST_S) if rate > 0 else LONGEST_S
