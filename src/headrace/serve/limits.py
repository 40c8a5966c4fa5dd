"""What each API key may still do: token buckets by the key's name. Owns the levels; knows no HTTP, reads no clock.

A bucket holds a minute's worth and fills evenly. A request takes what it asks for where that is there; where it asks
for more than the bucket can hold, it is let in when the bucket is full, so that nothing is refused for ever. At its end
the bucket gets back what was not used, or is charged for more, down into debt.
"""

from __future__ import annotations

import math

from headrace.serve.key_file import Key


class Bucket:
    """`per_minute` at most, by a clock in seconds that callers give."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is left; below zero where more was used than was asked for."""
        self._level = min(self._level + (now - self._at) * self.per_minute / 60, self.per_minute)
        self._at = now
        return self._level

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit; what was used stays used."""
        self._level = self.level(now) + per_minute - self.per_minute
        self.per_minute = per_minute

    def take(self, amount: int, now: float) -> float:
        """0 where it was taken, else in how many seconds it could be."""
        lacks = min(amount, self.per_minute) - self.level(now)
        if lacks > 0:
            return lacks * 60 / self.per_minute
        self._level -= amount
        return 0.0

    def give(self, amount: int, now: float) -> None:
        """Correct what was taken; negative for more."""
        self._level = min(self.level(now) + amount, self.per_minute)

    def full_in(self, now: float) -> float:
        """Seconds until it is full."""
        return (self.per_minute - self.level(now)) * 60 / self.per_minute


class Exceeded(Exception):
    """A limit of a key that was hit. `retry_s`: in how many seconds to come back, at least 1."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class KeyLimits:
    """The levels of all keys that have limits."""

    def __init__(self) -> None:
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._running: dict[str, int] = {}

    def begin(self, key: Key, now: float) -> None:
        """One more request of this key. Exceeded where it may not begin; else `end` must follow."""
        running = self._running.get(key.name, 0)
        if key.concurrent is not None and running >= key.concurrent:
            raise _exceeded(key, "concurrent", key.concurrent, f"{running} of its requests are running", 1)
        if (bucket := _of(self._requests, key.name, key.requests_per_minute, now)) is not None and (
            wait := bucket.take(1, now)
        ):
            raise _exceeded(key, "requests_per_minute", bucket.per_minute, "it has none left", wait)
        self._running[key.name] = running + 1

    def charge(self, key: Key, tokens: int, now: float) -> int:
        """Tokens that a request may need: its prompts and what it asks for. How many were taken: all, or none where the
        key has no such limit. Exceeded where they are not there."""
        bucket = _of(self._tokens, key.name, key.tokens_per_minute, now)
        if bucket is None:
            return 0
        if wait := bucket.take(tokens, now):
            left = f"this request needs {tokens} and {max(0, math.floor(bucket.level(now)))} are left"
            raise _exceeded(key, "tokens_per_minute", bucket.per_minute, left, wait)
        return tokens

    def end(self, key: Key, charged: int, used: int, now: float) -> None:
        """A request of this key is over; of the tokens that it was charged for it used so many."""
        left = self._running.pop(key.name) - 1
        if left:
            self._running[key.name] = left
        if (bucket := self._tokens.get(key.name)) is not None:
            bucket.give(charged - used, now)

    def headers(self, key: Key, now: float) -> dict[str, str]:
        """OpenAI's x-ratelimit headers, of the limits that the key has."""
        out = {}
        for kind, bucket in (
            ("requests", _of(self._requests, key.name, key.requests_per_minute, now)),
            ("tokens", _of(self._tokens, key.name, key.tokens_per_minute, now)),
        ):
            if bucket is not None:
                out[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                out[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now))))
                out[f"x-ratelimit-reset-{kind}"] = _span(bucket.full_in(now))
        return out


def _of(buckets: dict[str, Bucket], name: str, per_minute: int | None, now: float) -> Bucket | None:
    """The bucket of a key as its limit is just now; None where it has none. A bucket stays where the limit goes: a
    request that began before the file of keys changed must not empty, or fill, that of those after it."""
    if per_minute is None:
        return None
    bucket = buckets.get(name)
    if bucket is None:
        bucket = buckets[name] = Bucket(per_minute, now)
    elif bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _exceeded(key: Key, limit: str, allowed: int, why: str, wait_s: float) -> Exceeded:
    retry_s = max(1, math.ceil(wait_s))
    message = f"the API key {key.name!r} is over its limit {limit} = {allowed}: {why}; try again in {retry_s} s"
    return Exceeded(message, retry_s)


def _span(seconds: float) -> str:
    """As OpenAI writes them: 350ms, 17s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
