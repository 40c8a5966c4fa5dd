"""The chat of `headrace run`: reads lines, keeps the history. Ctrl-C ends an answer, never the program."""

from __future__ import annotations

import sys
from contextlib import suppress

from headrace.cli.answer import Asker, Interrupted, figures
from headrace.cli.console import fail, note, out
from headrace.errors import RequestError

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(asker: Asker, system: str | None) -> None:
    """Answer line after line until the user leaves. Lines can be edited and recalled; nothing is written to disk."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is there
    opening = [{"role": "system", "content": system}] if system is not None else []
    history = list(opening)
    note(f"{HELP}, /help repeats this")
    while True:
        try:
            line = input(">>> " if sys.stdout.isatty() else "").strip()
            match line:
                case "":
                    continue
                case "/exit" | "/quit" | "/bye":
                    return
                case "/help" | "/?":
                    note(HELP)
                case "/clear":
                    history = list(opening)
                    note("the conversation is forgotten")
                case _ if line.startswith("/") and " " not in line:
                    note(f"no command {line}; {HELP}")
                case _:
                    history = _turn(asker, history, line)
        except KeyboardInterrupt:
            out("\n")
            note("/exit or Ctrl-D leaves")
        except EOFError:
            out("\n")
            return


def _turn(asker: Asker, history: list[dict[str, str]], line: str) -> list[dict[str, str]]:
    """The history with the user's line and the answer, as far as it came; unchanged where the engine refuses it."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        output = asker.ask(asked, out)
        out("\n")
        note(figures(output))
    except Interrupted as e:
        output = e.output
        out("\n")
        note("stopped")
    except RequestError as e:
        fail(f"{e}; /clear starts a new conversation")
        return history
    return [*asked, {"role": "assistant", "content": output.outputs[0].text}]
