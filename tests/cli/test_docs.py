"""docs/cli.md has every option of the server. `python -m tests.cli.test_docs` writes its table anew."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from headrace.cli.options import option_name
from headrace.serve.options import ServerOptions

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def table() -> str:
    rows = ["| option | default | |", "|---|---|---|"]
    for field in fields(ServerOptions):
        match field.default:
            case None | () | False:
                default = "off" if field.default is False else "none"
            case int():
                default = f"{field.default:,}"
            case _:
                default = f"`{field.default}`"
        rows.append(f"| `{option_name(field.name)}` | {default} | {field.metadata['help']} |")
    return "\n".join(rows)


def written(page: str) -> str:
    begin, end = "<!-- table: server -->", "<!-- end -->"
    page, count = re.subn(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{table()}\n{end}", page, flags=re.DOTALL)
    assert count == 1
    return page


def test_the_table_is_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run `python -m tests.cli.test_docs`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
