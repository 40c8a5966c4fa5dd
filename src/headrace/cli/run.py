"""`headrace run`: one prompt answered, or a chat. Owns the options of sampling and what surrounds an answer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import engine as engines
from headrace.cli.answer import Asker, Interrupted, figures, tokens_per_s
from headrace.cli.chat import chat
from headrace.cli.console import note, out
from headrace.cli.options import MODEL, usage
from headrace.errors import HeadraceError
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.engine.outputs import RequestOutput

TEMPERATURE = 0.7
"""Where neither the user nor the model's generation config says one."""

_SAMPLING = "Sampling"


def run(
    model: MODEL,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to answer; `-` reads it from standard input, as does leaving it out where that is no terminal. "
            "Left out on a terminal: a chat.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message that goes before the prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of an answer; default: as many as the context holds.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help=f"0 is greedy; default: what the model's makers suggest, else {TEMPERATURE}.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the likeliest tokens that together reach this share, above 0 to 1; default: what the model's "
            "makers suggest, else off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep the k likeliest tokens, 0 is off; default: what the model's makers suggest, else off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less likely than this share of the likeliest, 0 to 1; default: what the model's makers "
            "suggest, else off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed gives the same answer; default: drawn anew.", rich_help_panel=_SAMPLING),
    ] = None,
    overflow: Annotated[
        str,
        typer.Option(
            help="What becomes of texts longer than the context: error, truncate-middle (the prompt's middle is left "
            "out), sliding (on in windows) or sinks (windows that keep the first tokens).",
            rich_help_panel=_SAMPLING,
        ),
    ] = "error",
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the answer; may be given several times.", rich_help_panel=_SAMPLING),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object with text, token ids, finish reason, usage and timings, at the end."
        ),
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a prompt, or chat.

    The answer goes to standard output as it comes; a line of figures follows on standard error.
    """
    with usage():
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            overflow=overflow,
            stop=stop or (),
        )
    if raw and system is not None:
        raise typer.BadParameter(
            "a system message needs the chat template, which --raw leaves out", param_hint="--system"
        )
    text = _prompt(prompt)
    if text is None and as_json:
        raise typer.BadParameter("needs a prompt; without one `run` is a chat", param_hint="--json")
    started = time.monotonic()
    with engines.open_llm(model, engine) as llm:
        loaded = time.monotonic()
        asker = Asker(llm, _with_default(params, llm), raw=raw or not _has_template(llm, model, system, raw=raw))
        if text is None:
            chat(asker, system)
        elif as_json:
            output = asker.ask(_conversation(text, system), lambda _: None)
            out(json.dumps(_report(model, output, loaded - started), ensure_ascii=False) + "\n")
        else:
            try:
                output = asker.ask(_conversation(text, system), out)
            except Interrupted:
                out("\n")
                raise
            if not output.outputs[0].text.endswith("\n"):
                out("\n")
            note(figures(output))


def _prompt(argument: str | None) -> str | None:
    """The prompt's text; None asks for a chat. A single newline at the end of standard input is not part of it."""
    if argument not in (None, "-") or (argument is None and sys.stdin.isatty()):
        return argument
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise HeadraceError(f"the prompt on standard input is not UTF-8: {e}") from e
    if not text.strip():
        raise HeadraceError("the prompt on standard input is empty")
    return text.removesuffix("\n")


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def _with_default(params: SamplingParams, llm: LLM) -> SamplingParams:
    if params.temperature is None and llm.model.checkpoint.generation.temperature is None:
        return replace(params, temperature=TEMPERATURE)
    return params


def _has_template(llm: LLM, model: str, system: str | None, *, raw: bool) -> bool:
    """Whether the model can chat; says so once where it cannot."""
    if raw or llm.tokenizer.chat_template is not None:
        return True
    if system is not None:
        raise HeadraceError(f"{model} has no chat template, so it has no place for --system")
    note(f"{model} has no chat template: it completes the text")
    return False


def _report(model: str, output: RequestOutput, load_s: float) -> dict[str, Any]:
    [choice] = output.outputs
    timings = choice.timings
    prompt, answer = len(output.prompt_token_ids), len(choice.token_ids)
    return {
        "model": model,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "seed": output.seed,
        "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
        "timings": {
            "load_s": round(load_s, 6),
            "queued_s": timings and timings.queued_s,
            "first_token_s": timings and timings.first_token_s,
            "total_s": timings and timings.total_s,
            "tokens_per_s": tokens_per_s(output),
        },
    }
