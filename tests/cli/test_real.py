"""The command with SmolLM2 itself."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--context", "512")


def headrace(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, input=stdin)


def answer(*args: str, stdin: str = "") -> dict[str, Any]:
    done = headrace("run", *args, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_run_answers(smollm2: Path) -> None:
    asked = "What is the capital of Japan?"
    streamed = headrace("run", "smollm2-135m", asked, *GREEDY)
    assert streamed.returncode == 0, streamed.stderr
    assert "Tokyo" in streamed.stdout
    assert "prompt tokens" in streamed.stderr
    told = answer("smollm2-135m", "-", *GREEDY, stdin=asked + "\n")
    assert told["text"].rstrip("\n") + "\n" == streamed.stdout
    assert told["usage"]["completion_tokens"] == len(told["token_ids"]) <= 8
    assert told["timings"]["total_s"] >= told["timings"]["first_token_s"] > 0
    assert told["finish_reason"] in ("stop", "length")


def test_packed_weights_are_kept_for_this_run_only(smollm2: Path) -> None:
    """The suite leaves the user's cache alone, and its processes share what one of them packed."""
    answer("smollm2-135m", "hi", *GREEDY)
    listed = json.loads(headrace("cache", "--json").stdout)
    assert {Path(entry["path"]).parents[1] for entry in listed} == {Path(os.environ["HEADRACE_CACHE"])}
    assert [entry["source"] for entry in listed].count(str(smollm2)) == 1


def test_a_prompt_that_does_not_fit_is_refused(smollm2: Path) -> None:
    done = headrace("run", "smollm2-135m", "word " * 100, "--context", "64")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "64" in done.stderr


def test_show(smollm2: Path) -> None:
    facts = json.loads(headrace("show", "smollm2-135m", "--json", "--context", "1024").stdout)
    assert facts["path"] == str(smollm2)
    assert facts["architecture"] == "llama"
    assert (facts["layers"], facts["width"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert facts["parameters"] == 134_515_008
    assert {t["format"]: t["tensors"] for t in facts["tensors"]} == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    assert (facts["context"], facts["options"]["context"]) == (8192, 1024)
    assert facts["memory"]["kv_per_1000_tokens"] == 30 * 2 * 3 * 64 * 2 * 1000
    assert facts["special_tokens"]["end"] == [{"id": 2, "text": "<|im_end|>"}]
    assert facts["chat_template"].startswith("{% for message in messages %}")
    assert "chat template 368 characters" in headrace("show", str(smollm2)).stdout


def test_show_kernels(smollm2: Path) -> None:
    for options, said in (((), "bf16"), (("--kv-format", "f32"), "f32")):
        lines = headrace("show", str(smollm2), "--kernels", *options).stdout.splitlines()
        [attend] = [line.split() for line in lines if line.startswith("attend")]
        assert attend[1:3] == [said, "30"]
        assert ("bfloat16" in attend) == (said == "bf16")
    told = json.loads(headrace("show", str(smollm2), "--json", "--kernels").stdout)
    assert {k["operation"] for k in told.pop("kernels")} >= {"embed", "linear", "attend"}
    assert told.pop("kernels_because")
    assert told.keys() == json.loads(headrace("show", str(smollm2), "--json").stdout).keys()


def test_pull_and_list(smollm2: Path) -> None:
    assert headrace("pull", "smollm2").stdout == f"{smollm2}\n"
    listed = {line["name"]: line for line in json.loads(headrace("list", "--json").stdout)}
    assert listed["smollm2-135m"]["path"] == str(smollm2)
    assert listed["smollm2-135m"]["nbytes"] == 98_362_432


def test_the_readme_says_what_the_model_answers(smollm2: Path) -> None:
    """Its first command, without the installing, prints the answer that stands under it."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = next(part for part in readme.splitlines() if part.startswith("pip install") and "headrace run" in part)
    _, *args = shlex.split(line.partition("&& ")[2])
    quoted = "\n".join(part[1:].strip() for part in readme.splitlines() if part.startswith(">"))
    done = headrace(*args)
    assert done.returncode == 0, done.stderr
    assert done.stdout == quoted + "\n"
