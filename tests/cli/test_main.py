"""The command as a whole: help, version, `list`, `pull`, `show`, `serve`; options made from the dataclasses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import native
from headrace.cache.plan import Demand, Needs, plan_memory
from headrace.cli import main as main_module
from headrace.cli import options
from headrace.cli import show as show_module
from headrace.cli.console import Bars, size
from headrace.cli.options import engine_options
from headrace.cli.plan import plan_facts, plan_lines
from headrace.config import CacheOptions, ExecuteOptions, LoadingOptions, Options, SchedulerOptions
from headrace.engine.past_load import Seen
from headrace.program.backend import Member
from headrace.serve.options import ServerOptions
from tests.cli.terminal import Terminal


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *args], capture_output=True, text=True, timeout=60)


def test_help_is_quick_and_names_every_command() -> None:
    took = []
    for _ in range(3):
        started = os.times()
        done = headrace("--help")
        ended = os.times()
        took.append(ended.children_user + ended.children_system - started.children_user - started.children_system)
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in ("run", "serve", "pull", "list", "show", "cache"))
    assert min(took) < 0.5, f"{min(took):.2f} s of processor time"


def test_ctrl_c_while_the_command_is_imported_ends_it_quietly() -> None:
    script = """
import sys
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "headrace.cli.run":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from headrace.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", ["run", "serve", "show"])
def test_every_engine_option_is_there_with_its_help(command: str) -> None:
    done = headrace(command, "--help")
    for part in (CacheOptions, SchedulerOptions, ExecuteOptions, LoadingOptions):
        for field in fields(part):
            assert options.option_name(field.name) in done.stdout
    assert "--no-weight-cache" in done.stdout
    assert "Longest prompt plus answer" in done.stdout


def test_every_server_option_is_there_and_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = headrace("serve", "--help").stdout
    for field in fields(ServerOptions):
        assert options.option_name(field.name) in shown
    seen: list[ServerOptions] = []
    fake = SimpleNamespace(serve=lambda model, **given: seen.append(given["server"]), ending_in_time=nullcontext)
    monkeypatch.setitem(sys.modules, "headrace.serve.app", fake)
    monkeypatch.setattr(sys, "argv", [
        "headrace", "serve", "m", "--cors-origin", "https://a.example", "--cors-origin", "https://b.example",
        "--log-format", "json", "--open-metrics", "--grace-s", "3",
    ])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert not ended.value.code
    origins = ("https://a.example", "https://b.example")
    assert seen == [ServerOptions(cors_origin=origins, log_format="json", open_metrics=True, grace_s=3)]


def test_a_refused_server_option_is_wrong_usage() -> None:
    done = headrace("serve", "m", "--log-format", "xml")
    assert done.returncode == 2
    assert "--log-format" in done.stderr


def test_nothing_heavy_is_imported_for_help() -> None:
    heavy = ("torch", "numpy", "huggingface_hub", "rich", "tokenizers")
    script = f"import sys, headrace.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version() -> None:
    assert headrace("--version").stdout == f"headrace {version('headrace')}\n"


def test_wrong_usage() -> None:
    for args in (["nonsense"], ["run"], ["pull"], ["pull", "a", "b"], ["serve", "m", "--port", "70000"]):
        done = headrace(*args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "pull", "show"])
def test_an_unknown_model_is_one_line_and_code_1(command: str) -> None:
    done = headrace(command, "smolm2", *(["hi"] if command == "run" else []))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no model 'smolm2'; near names: smollm2-135m")
    assert done.stderr.count("\n") == 1


def test_memory_that_cannot_be_had_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(**_: object) -> None:
        native.reserve(1 << 62)

    monkeypatch.setattr(main_module, "app", none_left)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "error: out of memory: the system has no 4611686018427 MB of memory to give; a smaller --pool"
    )
    assert said.count("\n") == 1


def test_pull_prints_the_path(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    done = headrace("pull", str(file))
    assert (done.stdout, done.stderr, done.returncode) == (f"{file}\n", "", 0)


def test_list(tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--org--repo" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "x-Q8_0.gguf").write_bytes(b"GGUF" + bytes(1996))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    done = headrace("list")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "WHAT", "OR", "WHERE"]
    assert lines[1].startswith("smollm2-135m ")
    assert lines[1].endswith("(not here yet)")
    assert lines[-1].split() == ["org/repo:x-Q8_0.gguf", "2.0", "kB", str(snapshot / "x-Q8_0.gguf")]
    listed = json.loads(headrace("list", "--json").stdout)
    assert listed[0] == {"name": "smollm2-135m", "about": listed[0]["about"], "path": None, "nbytes": None}
    assert listed[-1]["nbytes"] == 2000


def test_a_reader_of_a_table_may_leave() -> None:
    command = f"{sys.executable} -m headrace list | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout in ("0\n", "141\n")
    command = f"{sys.executable} -m headrace list | true; sleep 1"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stderr == ""


def test_serve_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.cli.serve as module

    seen: dict[str, Any] = {}
    fake = SimpleNamespace(
        serve=lambda model, **options: seen.update(model=model, **options), ending_in_time=nullcontext
    )
    monkeypatch.setitem(sys.modules, "headrace.serve.app", fake)
    server = ServerOptions(grace_s=3)
    module.serve("m", "0.0.0.0", 8001, "name", engine={"context": 512}, server=server)
    assert seen.pop("progress") is not None
    assert seen.pop("planned") is not None
    assert seen.pop("loaded") is not None
    assert seen == {
        "model": "m", "host": "0.0.0.0", "port": 8001, "options": {"context": 512}, "name": "name", "server": server,
    }  # fmt: skip


@pytest.mark.parametrize("ready", [True, False])
def test_serve_draws_bars_until_the_model_is_loaded_or_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    import headrace.cli.serve as module

    drawn: list[str] = []

    @contextmanager
    def bars() -> Iterator[str]:
        drawn.append("begin")
        yield "progress"
        drawn.append("end")

    def serve(model: str, **options: Any) -> None:
        assert options["progress"] == "progress"
        assert drawn == ["begin"]
        if ready:
            options["planned"](blueprint())
            options["loaded"]()
            assert drawn == ["begin", "end"]

    monkeypatch.setattr(module, "bars", bars)
    monkeypatch.setitem(sys.modules, "headrace.serve.app", SimpleNamespace(serve=serve, ending_in_time=nullcontext))
    module.serve("m", "0.0.0.0", 8001, None, engine={}, server=ServerOptions())
    assert drawn == ["begin", "end"]


def test_engine_options_come_from_the_fields() -> None:
    seen: dict[str, Any] = {}

    def command(model: str, *, engine: dict[str, Any]) -> None:
        seen.update(engine, model=model)

    made = engine_options(command)
    defaults = {name: p.default for name, p in made.__signature__.parameters.items() if name != "model"}  # type: ignore[attr-defined]
    assert set(defaults) == {
        "context", "memory", "past_load", "kv_format", "prefix_cache", "pin_prefix",
        "cache_dir", "cache_dir_bytes", "pool_bytes", "budget", "step_ms", "rows", "policy", "batch_size",
        "max_wait_ms", "queue_requests", "queue_tokens", "backend", "threads", "isa",
        "fusion", "weight_cache", "weight_cache_bytes",
    }  # fmt: skip
    assert Options.of(**defaults) == Options()
    made(**{"model": "m", **defaults, "rows": 3})
    assert seen == {"model": "m", **defaults, "rows": 3}


# bars


BARS = """
import sys, time
from headrace.cli.console import bars
with bars() as tell:
    for done in range(0, 101, 20):
        tell("downloading it", done * 1000000, 100000000)
        time.sleep(0.12)
    tell("downloading it", 100000000, 100000000)
    print("answer", flush=True)
"""


def test_bars_are_drawn_on_a_terminal_only() -> None:
    terminal = Terminal([sys.executable, "-c", BARS], os.environ, term="xterm")
    terminal.expect("downloading it")
    terminal.expect("answer")
    assert terminal.end() == 0
    done = subprocess.run([sys.executable, "-c", BARS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("answer\n", "")


OPENING = """
import time
from headrace.cli.console import bars
with bars() as tell:
    tell("opening it", 0, 0)
    time.sleep(0.3)
print("answer", flush=True)
"""


def test_a_bar_of_nothing_that_is_counted_shows_no_numbers() -> None:
    terminal = Terminal([sys.executable, "-c", OPENING], os.environ, term="xterm")
    assert "opening it" in (drawn := terminal.expect("answer"))
    assert terminal.end() == 0
    assert "bytes" not in drawn and "--:--" not in drawn


def test_a_finished_bar_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    class Drawn:
        task_ids = (0,)

        def __init__(self, *, counted: bool) -> None:
            assert counted

        def add_task(self, task: str, total: float | None) -> None:
            drawn.append(task)
            assert total == 2

        def start(self) -> None: ...
        def stop(self) -> None:
            drawn.append("stop")

        def update(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr("headrace.cli.console._bar", Drawn)
    tell = Bars()
    for task, done in (("a", 1), ("a", 2), ("a", 2), ("b", 1), ("c", 1)):
        tell(task, done, 2)
    tell.close()
    assert drawn == ["a", "stop", "b", "stop", "c", "stop"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (2_500_000_000, "2.50 GB"),
        (3 * 10**12, "3000.00 GB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# show, on a model that is made up


def blueprint(*, memory: str | None = None, demand: Demand | None = None, packing: int = 0, **more: Any) -> Any:
    opts = Options.of(context=4096, threads=2, memory=memory, **more)
    needs = Needs(100_000_000, 4_000_440, 1_000_000, 32_000, (None, 512, 512), 4096, 32768, packing)
    memory_plan = plan_memory(
        needs,
        granted=1_000_000_000,
        bound=opts.memory_bytes,
        pool_bytes=None,
        rows=None,
        default_rows=64,
        demand=demand,
        automatic=opts.automatic,
    )

    def tensor(shape: tuple[int, ...], kind: str, nbytes: int) -> Any:
        return SimpleNamespace(shape=shape, format=kind, nbytes=nbytes)

    attention = SimpleNamespace(heads=8, kv_heads=2, dim=64)
    tokens = {1: b"<s>", 2: b"</s>", 3: b"<end>"}
    groups = [SimpleNamespace(window=None), SimpleNamespace(window=512), SimpleNamespace(window=512)]
    return SimpleNamespace(
        members=(Member("linear", "Q8_0", 7, "native avx2", "int8 inputs"),),
        backend=SimpleNamespace(because="avx2 is the best"),
        checkpoint=SimpleNamespace(
            path=Path("/m/x.gguf"),
            source=SimpleNamespace(
                kind="gguf",
                tensors={
                    "a": tensor((10, 10), "F32", 400),
                    "b": tensor((1000, 1000), "Q8_0", 1_062_500),
                    "c": tensor((10,), "F32", 40),
                },
            ),
            spec=SimpleNamespace(
                family="gemma3_text",
                blocks=[SimpleNamespace(attention=attention)] * 6,
                width=640,
                vocab=1000,
                context=32768,
            ),
            tokenizer=SimpleNamespace(
                bos=1, add_bos=True, pad=None, vocab_size=4, chat_template="line\n" * 8, piece=lambda i: tokens[i]
            ),
            generation=GENERATION(0.6, None, 64, None, None),
            eos=frozenset({3, 2}),
        ),
        program=SimpleNamespace(kv=SimpleNamespace(groups=groups)),
        options=opts,
        seen=None,
        threads=SimpleNamespace(reason="2 cores by affinity"),
        memory=SimpleNamespace(
            stored=1_062_940,
            weights=4_000_440,
            buffers=1_000_000,
            token=3000,
            pool=SimpleNamespace(blocks=10, block_bytes=32_000),
            plan=memory_plan,
        ),
        limits=SimpleNamespace(pool_tokens=4096),
    )


def GENERATION(*values: Any) -> Any:
    from headrace.loading.checkpoint import GenerationDefaults

    return GenerationDefaults(*values)


def test_show_tells_everything() -> None:
    facts = json.loads(json.dumps(show_module.describe("tiny", blueprint())))
    assert facts["parameters"] == 1_000_110
    assert facts["tensors"] == [
        {"format": "Q8_0", "tensors": 1, "numbers": 1_000_000, "bytes": 1_062_500},
        {"format": "F32", "tensors": 2, "numbers": 110, "bytes": 440},
    ]
    assert facts["windows"] == [512]
    assert facts["special_tokens"] == {
        "bos": {"id": 1, "text": "<s>"},
        "add_bos": True,
        "end": [{"id": 2, "text": "</s>"}, {"id": 3, "text": "<end>"}],
        "pad": None,
    }
    assert facts["memory"] == {
        "weights_stored": 1_062_940,
        "weights_loaded": 4_000_440,
        "step_buffers": 1_000_000,
        "kv_per_1000_tokens": 3_000_000,
        "kv_per_1000_tokens_past_windows": 1_000_000,
        "pool": 320_000,
        "pool_tokens": 4096,
    }
    assert facts["options"] == {
        "context": 4096,
        "memory": None,
        "past_load": True,
        "kv_format": "bf16",
        "prefix_cache": True,
        "pin_prefix": None,
        "cache_dir": None,
        "cache_dir_bytes": 10_000_000_000,
        "pool_bytes": None,
        "budget": 512,
        "step_ms": None,
        "policy": "continuous",
        "batch_size": None,
        "max_wait_ms": None,
        "queue_requests": 1024,
        "queue_tokens": 1_000_000,
        "rows": None,
        "backend": "native",
        "threads": 2,
        "isa": None,
        "fusion": True,
        "weight_cache": True,
        "weight_cache_bytes": 20_000_000_000,
    }
    text = "".join(show_module._lines(facts))
    for part in (
        "architecture  gemma3_text, 1.0 million parameters",
        "context       trained for 32,768 tokens, configured 4,096",
        "tensors       Q8_0       1     1.1 MB",
        "weights       1.1 MB stored, 4.0 MB in memory (native)",
        "KV cache      3.0 MB per 1,000 tokens, past the window 1.0 MB",
        "end '</s>' (2), '<end>' (3)",
        "sampling      temperature 0.6, top_k 64",
        "chat template 40 characters",
        "… 3 more (--json has all)",
    ):
        assert part in text, text


def test_show_tells_which_kernels_serve() -> None:
    plain = json.loads(json.dumps(show_module.describe("tiny", blueprint())))
    assert not any("kernel" in key for key in plain), "only where they are asked for"
    facts = plain | json.loads(json.dumps(show_module.kernels_of(blueprint())))
    assert facts["kernels"] == [
        {"operation": "linear", "format": "Q8_0", "count": 7, "served_by": "native avx2", "how": "int8 inputs"}
    ]
    text = "".join(show_module._kernels(facts))
    assert "linear        Q8_0       7 × native avx2     int8 inputs" in text
    assert "avx2 is the best" in text


def test_show_of_a_model_that_says_little() -> None:
    plan = blueprint()
    plan.checkpoint.tokenizer.chat_template = None
    plan.checkpoint.generation = GENERATION(None, None, None, None, None)
    text = "".join(show_module._lines(show_module.describe("tiny", plan)))
    assert "chat template none: the model completes text" in text
    assert "temperature 0.7 in run, 1 in the API" in text


def test_the_plan_tells_every_part_and_what_remains() -> None:
    plan = blueprint(memory="200MB", cache_dir="/kv", cache_dir_bytes=20_000_000)
    facts = json.loads(json.dumps(show_module.describe("tiny", plan)))["plan"]
    assert facts["process"] + facts["weights"] + facts["buffers"] + facts["pool"] == facts["total"]
    assert facts["total"] + facts["remains"] == facts["memory"] == 200_000_000
    assert facts["disk_tier"] == {"folder": "/kv", "bytes": 20_000_000}
    assert facts["past_load"] is facts["proposal"] is None
    lines = "".join(plan_lines(facts))
    for part in (
        "memory        200.0 MB by the option; 1.00 GB are granted to this process",
        "weights          4.0 MB",
        "KV pool         95.0 MB  what memory leaves",
        "disk tier       20.0 MB  at most, of blocks that left the pool: /kv",
        "together       200.0 MB",
        "at once       18 of the context 4,096, 2 of the model's own 32,768; 64 rows in a step",
        "past load     none known\n",
    ):
        assert part in lines, lines
    lines = "".join(plan_lines(plan_facts(blueprint())))
    assert "memory        1.00 GB are granted to this process\n" in lines
    assert "half of what is left" in lines
    assert "first start" not in lines
    lines = "".join(plan_lines(plan_facts(blueprint(memory="200MB", packing=150_000_000))))
    assert "first start    254.0 MB" in lines
    assert "tier" not in lines


@pytest.mark.parametrize("memory", [None, "auto"])
def test_the_plan_shows_its_evidence(memory: str | None) -> None:
    seen = Seen(since="2026-01-31")
    few = blueprint(memory=memory)
    few.seen = seen
    assert ("memory auto is as the default" in "".join(plan_lines(plan_facts(few)))) == (memory == "auto")
    for _ in range(200):
        for counts, number in ((seen.prompt, 100), (seen.answer, 27), (seen.length, 127), (seen.at_once, 12)):
            counts.add(number)
    plan = blueprint(memory=memory, demand=seen.demand())
    plan.seen = seen
    lines = "".join(plan_lines(plan_facts(plan)))
    assert (
        "past load     200 answers since 2026-01-31: 99 of 100 had at most 127 tokens (prompt 100, answer 27), "
        "the longest 127;\n"
        "              99 of 100 came with at most 12 under way at once, the most 12\n"
        "proposal      for such a load a KV pool of "
    ) in lines
    assert ("--memory auto takes them" in lines) == (memory is None)
    assert ("taken as far as it fits" in lines and "as past load needed" in lines) == (memory == "auto")
    assert ("15 rows in a step" in lines) == (memory == "auto")
