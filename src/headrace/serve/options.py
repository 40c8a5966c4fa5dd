"""The server's options. Plain data, judged without looking at files or sockets; the command line is made from the
fields, as it is from those of `headrace.config`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.config import option
from headrace.errors import OptionError

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
FAILURES = ("exit", "restart")
RESTARTS_S = 600
"""The time over which restarts of the engine are counted."""
KEY_CHARACTERS = 8
"""Fewest characters of an API key."""
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-_\[\]:]+")
_KEY = re.compile(rf"[\x21-\x7e]{{{KEY_CHARACTERS},512}}")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a model is served, whatever the model."""

    api_key: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "a key that clients must send; anybody on this machine can read it in the list of processes: "
            "a file of keys is better"
        },
    )
    api_key_file: str | None = option(
        None, "TOML file of keys that clients must send one of, and of their limits; read again when it changes"
    )
    open_metrics: bool = option(False, "let /metrics be read without a key where keys are set")
    tls_cert: str | None = option(None, "PEM file with the certificate (chain) for HTTPS")
    tls_key: str | None = option(None, "PEM file with the certificate's private key")
    cors_origin: tuple[str, ...] = option(
        (),
        "origin whose pages may use the API from a browser, as https://example.org, or *; may be given several times",
    )
    body_bytes: int = option(16 * 2**20, "largest body of a request; larger ones are refused (413)")
    head_bytes: int = option(2**16, "largest head of a request; larger ones are refused (431)")
    connections: int | None = option(
        None,
        "most connections at once; more are refused (503); never more than, and by default, half of the "
        "descriptors that the process may have",
    )
    silence_s: int = option(60, "seconds that a client may be silent before its request is whole")
    keep_alive_s: int = option(75, "seconds that a connection without a request is kept open")
    unread_s: int = option(30, "seconds that a client may read nothing of what waits for it before it is let go")
    unread_tokens: int = option(
        32_768,
        "tokens, their log-probabilities counted one by one, that may wait for a client that reads slowly; "
        "then its request is ended",
    )
    grace_s: int = option(10, "seconds that running requests have when the server is told to stop; 0: none")
    on_engine_failure: str = option(
        "exit",
        f"what follows when the engine dies: {', '.join(FAILURES)}; exit ends the process with code 1, restart "
        "loads the model again",
    )
    engine_restarts: int = option(
        3, f"most restarts of the engine within {RESTARTS_S // 60} minutes; one more failure ends the process"
    )
    log_format: str = option("text", f"how lines of the log are written: {', '.join(LOG_FORMATS)}")
    log_level: str = option(
        "info", f"the least that is logged: {', '.join(LOG_LEVELS)}; info has one line for each request"
    )
    log_texts: bool = option(False, "log prompts and answers too")

    def __post_init__(self) -> None:
        _judge_key(self.api_key)
        if (self.tls_cert is None) != (self.tls_key is None):
            lacks, has = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            raise OptionError(f"{has} needs {lacks} beside it", lacks)
        for origin in self.cors_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise OptionError(
                    f"cors_origin must be an origin like https://example.org, without a path, or *, not {origin!r}",
                    "cors_origin",
                )
        least = dict.fromkeys(
            ("body_bytes", "silence_s", "keep_alive_s", "unread_s", "unread_tokens", "engine_restarts"), 1
        )
        for name, smallest in (least | {"head_bytes": 1024, "grace_s": 0}).items():
            _judge_number(name, getattr(self, name), smallest)
        if self.connections is not None:
            _judge_number("connections", self.connections, 1)
        for name, known in (
            ("on_engine_failure", FAILURES),
            ("log_format", LOG_FORMATS),
            ("log_level", LOG_LEVELS),
        ):
            if (value := getattr(self, name)) not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, not {value!r}", name)

    @property
    def restarts(self) -> int:
        """Restarts of the engine that may follow each other."""
        return self.engine_restarts if self.on_engine_failure == "restart" else 0

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def is_key(value: str) -> bool:
    """Whether it can be an API key: printable ASCII without spaces, as a header can carry it."""
    return _KEY.fullmatch(value) is not None


def _judge_key(key: str | None) -> None:
    if key is not None and not is_key(key):
        raise OptionError(
            f"api_key must be {KEY_CHARACTERS} to 512 printable ASCII characters without spaces", "api_key"
        )


def _judge_number(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}", name)
