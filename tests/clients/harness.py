"""lm-eval-harness against a live server: URL MODEL OUT as arguments. Ends with 0 where both tasks ran end to end.

A multiple-choice and a generation task over `tasks/places.jsonl`, by its models local-completions and
local-chat-completions. OUT gets the log-likelihoods that it computed, for `same_loglikelihoods.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL, OUT = sys.argv[1:]
TASKS = Path(__file__).parent / "tasks"


def ran(kind: str, task: str, folder: str, **how: Any) -> list[dict[str, Any]]:
    """Its samples."""
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"base_url": f"{URL}/v1/{path}", "model": MODEL, "num_concurrent": 4, "max_retries": 1}
    if "chat" not in kind:
        arguments["tokenizer_backend"] = "remote"
    manager = TaskManager(include_path=folder, include_defaults=False)
    found = lm_eval.simple_evaluate(
        kind, model_args=arguments, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0, **how
    )
    assert found is not None
    print(f"lm-eval-harness, {kind}, {task}: {found['results'][task]}")
    samples: list[dict[str, Any]] = found["samples"][task]
    assert len(samples) == 10
    return samples


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for file in TASKS.glob("*.yaml"):
            text = file.read_text(encoding="utf-8").replace("PLACES", str(TASKS / "places.jsonl"))
            (Path(folder) / file.name).write_text(text, encoding="utf-8")
        choices = ran("local-completions", "headrace_choice", folder)
        words = ran("local-completions", "headrace_words", folder)
        chats = ran("local-chat-completions", "headrace_words", folder, apply_chat_template=True)
    assert all(sample["resps"][0][0].strip() for sample in words)
    assert any(sample["resps"][0][0].strip() for sample in chats)
    told = [
        {"context": arguments[0], "continuation": arguments[1], "loglikelihood": float(answer[0][0])}
        for sample in choices
        for arguments, answer in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    Path(OUT).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
