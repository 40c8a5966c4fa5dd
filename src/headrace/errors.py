"""Every error that Headrace raises on purpose. Each says what was wrong, where, and what would be right."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised on purpose."""


def shown(value: object) -> str:
    """A value for a message: its repr, cut; Python writes out no number of more than 4,300 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 128 else text[:128] + "..."


class RequestError(HeadraceError, ValueError):
    """A request that cannot be served as it stands; over HTTP a 400.

    `param` is the field at fault, as the client spelled it ("temperature", "messages[2].content"), or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OptionError(HeadraceError, ValueError):
    """An option of the engine, the server or the command line that cannot hold; names the option."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class ModelNotFoundError(HeadraceError):
    """No such model: the message lists near names or the ways that were tried."""


class ModelFileError(HeadraceError):
    """A model file that is broken, hostile, or uses something Headrace cannot run; names the file and the part."""

    def __init__(self, path: object, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = str(path)


class OverloadedError(HeadraceError):
    """The queue is full: the same request may be served later; over HTTP a 429.

    `retry_s` is how many seconds to wait, at least 1.
    """

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class UnreadError(HeadraceError):
    """A stream was ended because too much of it waited to be read; over HTTP an event, the last one."""


class EngineDeadError(HeadraceError):
    """The engine stopped on an unexpected failure; no request can be served any more."""
