"""docs/api.md says of every field what the code does. `python tests/serve/test_docs.py` writes its tables anew."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from headrace.serve.app import LAST_S, LEFT_S, TOLD_S
from headrace.serve.bodies import ChatBody, CompletionBody
from headrace.serve.embedding import REFUSED as EMBEDDINGS
from headrace.serve.embedding import EmbeddingBody
from headrace.serve.fields import CHAT, COMPLETIONS, IGNORED, Refused
from headrace.serve.messages import REFUSED as REFUSED_KEYS
from headrace.serve.options import ServerOptions
from headrace.serve.tokenizing import DETOKENIZE, TOKENIZE, DetokenizeBody, TokenizeBody

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def supported(body: type[BaseModel]) -> str:
    rows = [f"| `{name}` | {field.description} |" for name, field in body.model_fields.items()]
    return "\n".join(["| field | meaning |", "|---|---|", *rows])


def refused(fields: Mapping[str, Refused]) -> str:
    rows = []
    for name, rule in sorted(fields.items()):
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in (None, *rule.neutral))
        rows.append(f"| `{name}` | {rule.why} | {accepted} |")
    return "\n".join(["| field | why, or what to use | still accepted |", "|---|---|---|", *rows])


TABLES = {
    "chat": supported(ChatBody),
    "completions": supported(CompletionBody),
    "embeddings": supported(EmbeddingBody),
    "tokenize": supported(TokenizeBody),
    "detokenize": supported(DetokenizeBody),
    "ignored": "\n".join(
        [
            "| field | why it is harmless |",
            "|---|---|",
            *(f"| `{name}` | {why} |" for name, why in sorted(IGNORED.items())),
        ]
    ),
    "refused-chat": refused(CHAT),
    "refused-completions": refused(COMPLETIONS),
    "refused-embeddings": refused(EMBEDDINGS),
    "refused-tokenize": refused(TOKENIZE),
    "refused-detokenize": refused(DETOKENIZE),
    "refused-keys": "\n".join(
        ["| key | why |", "|---|---|", *(f"| `{key}` | {why} |" for key, why in sorted(REFUSED_KEYS.items()))]
    ),
}


def written(page: str) -> str:
    """The page with its tables as the code has them; each stands between two comments."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        page, count = re.subn(
            rf"{re.escape(begin)}\n.*?{end}", lambda _, new=f"{begin}\n{table}\n{end}": new, page, flags=re.DOTALL
        )
        assert count == 1, f"docs/api.md has {count} places for the table {name}"
    return page


def test_tables_are_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run `python tests/serve/test_docs.py`"


def test_the_advice_on_the_end_follows_the_code() -> None:
    """Who kills a server that was told to stop waits longer than its end may take."""
    page = (PAGE.parent / "operations.md").read_text(encoding="utf-8")
    advice = re.search(r"by (\d+) seconds to be safe: (\d+) with the default `--grace-s` of (\d+)", page)
    assert advice is not None
    more, wait, grace = map(int, advice.groups())
    assert (grace, wait) == (ServerOptions().grace_s, grace + more)
    assert more > 2 * TOLD_S + LAST_S + LEFT_S
    assert f"docker stop -t {wait}" in page and f"--stop-timeout {wait}" in page
    unit = re.search(r"--grace-s (\d+).*?\nTimeoutStopSec=(\d+)\n", page, re.DOTALL)
    assert unit is not None
    assert int(unit[2]) >= int(unit[1]) + more


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
