"""`headrace run` with a model made of words (see stand_in): what goes where, exit codes, chat, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import Terminal

SCRIPT = str(Path(__file__).with_name("stand_in.py"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What reached the model."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("STAND_IN_LOG", str(path))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return path


def headrace(*args: str, stdin: str | bytes | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if data is None else {"input": data}
    command = [sys.executable, SCRIPT, *args]
    done = subprocess.run(command, capture_output=True, env=os.environ | env, timeout=60, **source)
    return subprocess.CompletedProcess(args, done.returncode, done.stdout.decode(), done.stderr.decode())


def on_terminal(*args: str) -> Terminal:
    return Terminal([sys.executable, SCRIPT, *args], os.environ)


# one answer


def test_the_answer_goes_out_and_the_figures_beside(log: Path) -> None:
    done = headrace("run", "m", "hello there world")
    assert done.stdout == "echo 1: hello there world\n"
    assert done.stderr == "3 prompt tokens · first token 0.25 s · 5 tokens · 10.0 tokens/s\n"
    assert done.returncode == 0
    assert log.read_text().splitlines()[-2:] == ["close", "end"]


def test_parameters_reach_the_model(log: Path) -> None:
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 --stop x --stop y,z"
    options += " --overflow sinks"
    headrace("run", "m", "hi", "--system", "be brief", *options.split(), "--context", "512", "--kv-format", "bf16")
    opened, asked, *_ = log.read_text().splitlines()
    assert opened.startswith(
        "open m {'context': 512, 'memory': None, 'past_load': True, 'kv_format': 'bf16', 'prefix_cache': True,"
    )
    assert asked.startswith(
        "chat ['system=be brief', 'user=hi'] SamplingParams(n=1, temperature=0.5, top_p=0.9, top_k=40"
    )
    assert "min_p=0.1" in asked
    assert "seed=7, max_tokens=5, min_tokens=0, stop=('x', 'y,z')" in asked
    assert "overflow='sinks'" in asked


@pytest.mark.parametrize(
    ("model", "args", "temperature"), [("m", [], 0.7), ("cool", [], None), ("m", ["--temperature", "0"], 0.0)]
)
def test_the_default_temperature(log: Path, model: str, args: list[str], temperature: float | None) -> None:
    headrace("run", model, "hi", *args)
    assert f"temperature={temperature}," in log.read_text()


def test_raw_leaves_the_template_out(log: Path) -> None:
    assert headrace("run", "m", "once upon", "--raw").stdout == " and so on\n"
    assert "raw 'once upon'" in log.read_text()


def test_a_model_without_template_says_so_once(log: Path) -> None:
    done = headrace("run", "bare", "once upon")
    assert done.stdout == " and so on\n"
    assert done.stderr.splitlines()[0] == "bare has no chat template: it completes the text"
    assert done.stderr.count("template") == 1
    assert "template" not in headrace("run", "bare", "once upon", "--raw").stderr
    refused = headrace("run", "bare", "hi", "--system", "s")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: bare has no chat template, so it has no place for --system\n"


def test_json(log: Path) -> None:
    done = headrace("run", "m", "hello there cut", "--json", "--seed", "11")
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["timings"].pop("load_s") >= 0
    assert answer == {
        "model": "m",
        "text": "echo 1: hello there cut",
        "token_ids": [100, 101, 102, 103, 104],
        "finish_reason": "length",
        "stop_reason": None,
        "seed": 11,
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        "timings": {"queued_s": 0.1, "first_token_s": 0.25, "total_s": 0.65, "tokens_per_s": pytest.approx(10)},
    }
    assert json.loads(headrace("run", "m", "unicode", "--json").stdout)["text"] == "café 模型\N{GRINNING FACE}"


def test_a_cut_answer_is_told(log: Path) -> None:
    assert headrace("run", "m", "cut").stderr.endswith("· cut at the length limit\n")


@pytest.mark.parametrize("args", [["-"], []])
def test_the_prompt_from_standard_input(log: Path, args: list[str]) -> None:
    done = headrace("run", "m", *args, stdin="two\nlines é\n")
    assert done.stdout == "echo 1: two\nlines é\n"
    assert "user=two\\nlines é'" in log.read_text()


def test_a_given_prompt_leaves_standard_input_alone(log: Path) -> None:
    assert headrace("run", "m", "hi", stdin="other").stdout == "echo 1: hi\n"


def test_bad_standard_input(log: Path) -> None:
    for stdin, message in ((b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "is not UTF-8")):
        done = headrace("run", "m", "-", stdin=stdin)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: the prompt on standard input " + message)
    assert log.read_text() == ""


# errors


def test_errors_are_one_line_and_code_1(log: Path) -> None:
    done = headrace("run", "m", "long")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the prompt has 9 tokens, the context holds 8\n"
    done = headrace("run", "m", "broken")
    assert (done.returncode, done.stdout) == (1, "echo")
    assert done.stderr == "error: the logits are not finite\n"
    assert log.read_text().splitlines()[-2:] == ["close", "end"]


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-k", "-2"], "--top-k"),
        (["--min-p", "2"], "--min-p"),
        (["--seed", str(2**63)], "--seed"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--stop", ""], "--stop"),
        (["--kv-format", "int3"], "--kv-format"),
        (["--threads", "0"], "--threads"),
        (["--backend", "abacus"], "--backend"),
        (["--backend", "torch", "--isa", "avx2"], "--isa"),
        (["--threads", "100000"], "--threads"),
        (["--context", "x"], "--context"),
        (["--raw", "--system", "s"], "--system"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_code_2_and_opens_nothing(log: Path, args: list[str], option: str) -> None:
    done = headrace("run", "m", "hi", *args, COLUMNS="200")
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr
    assert f"{option}[" not in done.stderr
    assert "Traceback" not in done.stderr
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--temp", "--temperature"),
        ("--temp=0.5", "--temperature"),
        ("--max", "--max-tokens, --max-wait-ms"),
        ("--no-w", "--no-weight-cache"),
        ("--temprature", "--temperature"),
    ],
)
def test_an_option_that_is_not_there_points_to_the_one_that_was_meant(typed: str, meant: str, log: Path) -> None:
    done = headrace("run", "m", "hi", typed, COLUMNS="200")
    assert done.returncode == 2
    assert f"No such option: {typed.partition('=')[0]} (Possible options: {meant})" in done.stderr


def test_a_reader_that_leaves_is_no_error(log: Path) -> None:
    command = f'{sys.executable} {SCRIPT} run m "slow {"word " * 30}" | head -c 4; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "echo141\n"
    assert done.stderr == ""
    assert log.read_text().splitlines()[-2:] == ["close", "end"]


def test_ctrl_c_ends_one_answer_with_130(log: Path) -> None:
    command = [sys.executable, SCRIPT, "run", "m", "slow " + "word " * 100]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(4) == "echo"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert log.read_text().splitlines()[-2:] == ["close", "end"]


def test_the_answer_comes_as_it_is_made(log: Path) -> None:
    command = [sys.executable, SCRIPT, "run", "m", "slow " + "word " * 20]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(6)
    first = time.monotonic()
    process.stdout.read()
    assert time.monotonic() - first > 1
    assert process.wait() == 0


# on a terminal


def test_chat_keeps_the_history(log: Path) -> None:
    terminal = on_terminal("run", "m", "--system", "be brief")
    terminal.expect("/exit")
    terminal.expect(">>> ")
    terminal.type("hello\n")
    terminal.expect(r"echo 2: hello\r\n.*1 prompt tokens")
    terminal.expect(">>> ")
    terminal.type("again\n")
    terminal.expect("echo 4: again\r\n")
    terminal.expect(">>> ")
    terminal.type("/help\n")
    terminal.expect("Ctrl-D leaves")
    terminal.type("/clear\n")
    terminal.expect("forgotten")
    terminal.type("new\n")
    terminal.expect("echo 2: new\r\n")
    terminal.type("/nonsense\n")
    terminal.expect("no command /nonsense")
    terminal.type("/exit\n")
    assert terminal.end() == 0
    asked = [line for line in log.read_text().splitlines() if line.startswith("chat")]
    history = "['system=be brief', 'user=hello', 'assistant=echo 2: hello', 'user=again']"
    assert asked[1].startswith(f"chat {history}")
    assert asked[2].startswith("chat ['system=be brief', 'user=new']")


def test_ctrl_c_stops_the_answer_and_not_the_chat(log: Path) -> None:
    terminal = on_terminal("run", "m")
    terminal.expect(">>> ")
    terminal.type("slow " + "word " * 100 + "\n")
    terminal.expect("echo 1: slow word")
    terminal.type("\x03")
    terminal.expect("stopped")
    terminal.expect(">>> ")
    terminal.type("next\n")
    terminal.expect("echo 3: next\r\n")
    terminal.expect(">>> ")
    terminal.interrupt("/exit or Ctrl-D leaves")
    terminal.expect(">>> ")
    terminal.type("half a line\x03")
    terminal.expect("/exit or Ctrl-D leaves")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    asked = [line for line in log.read_text().splitlines() if line.startswith("chat")]
    assert len(asked) == 2
    assert "'assistant=echo 1: slow word" in asked[1]
    assert log.read_text().splitlines()[-1] == "end"


def test_a_line_can_be_edited_and_recalled(log: Path) -> None:
    terminal = on_terminal("run", "m")
    terminal.expect(">>> ")
    terminal.type("helo\x1b[Dl\n")
    terminal.expect("echo 1: hello\r\n")
    terminal.expect(">>> ")
    terminal.type("\x1b[A\n")
    terminal.expect("echo 3: hello\r\n")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_refused_turn_leaves_the_history_as_it_was(log: Path) -> None:
    terminal = on_terminal("run", "m")
    terminal.expect(">>> ")
    terminal.type("too long\n")
    terminal.expect("error: the prompt has 9 tokens.*/clear")
    terminal.type("short\n")
    terminal.expect("echo 1: short\r\n")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_json_is_no_chat(log: Path) -> None:
    terminal = on_terminal("run", "m", "--json")
    terminal.expect("--json")
    assert terminal.end() == 2
    assert log.read_text() == ""


def test_an_answer_cannot_steer_the_terminal(log: Path) -> None:
    terminal = on_terminal("run", "m", "control")
    terminal.expect("a\ufffd\\[2J\ufffdb\tc\r\nd\ufffd\ufffd")
    assert terminal.end() == 0
    assert headrace("run", "m", "control").stdout == "a\x1b[2J\x9bb\tc\nd\r\x07\n"


def test_ctrl_c_at_a_terminal_without_chat(log: Path) -> None:
    terminal = on_terminal("run", "m", "slow " + "word " * 100)
    terminal.expect("echo 1: slow word")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.text


# standard streams that are not there


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        ("- <&-", 1, "the prompt on standard input is empty"),
        ("<&-", 1, "the prompt on standard input is empty"),
        ("hi >&-", 0, "prompt tokens"),
        ("hi >/dev/full", 1, "error: cannot write to standard output: No space left on device"),
        ("hi 2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(log: Path, redirection: str, code: int, said: str) -> None:
    command = f"{sys.executable} {SCRIPT} run m {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
