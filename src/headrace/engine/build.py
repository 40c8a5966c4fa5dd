"""Puts an engine together: files, program, memory, executor, scheduler. The one place that knows all the parts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cache.blocks import Blocks
from headrace.cache.plan import MemoryPlan, Needs, plan_memory
from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.cache.radix import PrefixCache
from headrace.cache.tiers import DiskTier
from headrace.config import MAX_WAIT_MS, ROWS, CacheOptions, ExecuteOptions, Options, SchedulerOptions
from headrace.constrain.compiler import Compiled, Compiler
from headrace.constrain.masks import Filler
from headrace.engine.admission import LONGEST, Limits, admit, cut, reads
from headrace.engine.gate import Gate
from headrace.engine.loop import Engine
from headrace.engine.past_load import LoadKeeper, Seen, read_seen
from headrace.errors import ModelFileError, OptionError, RequestError
from headrace.execute.local import LocalExecutor, logits_at_once
from headrace.hardware import Granted, granted_memory, resident, threads
from headrace.loading.checkpoint import Checkpoint, load_weights, open_checkpoint
from headrace.loading.progress import Progress, silent
from headrace.loading.resolve import resolve
from headrace.loading.weight_cache import WeightCache
from headrace.loading.weight_file import digest_of
from headrace.native import isas
from headrace.native.sampling import NativeSampling
from headrace.params import SamplingParams
from headrace.paths import cache_home
from headrace.program.backend import Announced, Backend, Largest, Member
from headrace.program.decoder import write_program
from headrace.program.program import Program
from headrace.scheduler.messages import Abort, Delta, Submit
from headrace.scheduler.pace import Pace
from headrace.scheduler.policy import Continuous, Dynamic, Policy, Static
from headrace.scheduler.scheduler import Scheduler, Stats
from headrace.tokenize.stream import TextStream
from headrace.tokenize.tokenizer import Tokenizer

log = logging.getLogger(__name__)

GROWTH = 32 << 20
"""Bytes that a process grows by, once it serves: threads, templates, requests' tokens and texts."""
GRAIN = 4 << 20
"""Bytes to whose multiple what the process takes is rounded up, so that the next start plans the same."""


@dataclass(frozen=True)
class Memory:
    """Bytes, known before a weight is read."""

    stored: int
    """Weights as the files hold them."""
    weights: int
    """Weights as the backend keeps them."""
    buffers: int
    """The program's buffers in a step of `budget` tokens, all of them wanted, as log-probabilities of prompts may want
    them: `Backend.buffer_bytes`."""
    pool: PoolShape
    token: int
    """KV of one token over all layers."""
    plan: MemoryPlan


@dataclass(frozen=True)
class Blueprint:
    """A model and its options, resolved: all that can be known of an engine before weights are read."""

    checkpoint: Checkpoint
    program: Program
    options: Options
    """With `context`, `rows` and `threads` filled in."""
    threads: Granted
    memory: Memory
    seen: Seen | None
    """Past load of this model; None where none is known."""
    limits: Limits
    members: tuple[Member, ...]
    """Who serves which operation."""
    backend: Backend

    @property
    def context(self) -> int:
        return self.limits.context


def plan_engine(path: Path, options: Options) -> Blueprint:
    """Read the headers at `path` and size everything. ModelFileError or OptionError where it cannot work."""
    checkpoint = open_checkpoint(path, cache_dir=cache_home() / "tokenizers")
    trained = checkpoint.spec.context
    context = options.context or trained
    if context > trained:
        raise OptionError(f"context is {context}, but the model was made for {trained} tokens at most", "context")
    granted = threads(options.execute.threads)
    try:
        program = write_program(checkpoint.spec, checkpoint.parts, context)
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error
    backend = _backend(options.execute)
    if reason := backend.lacks(program):
        raise ModelFileError(path, f"{reason}; backend torch can run it")
    tensors = checkpoint.source.tensors
    announced = {name: Announced(p.shape, tensors[p.tensor].format) for name, p in checkpoint.parts.items()}
    seen = read_seen(checkpoint)
    memory = _memory(checkpoint, program, backend, announced, options, context, granted.count, seen)
    options = dataclasses.replace(
        options,
        context=context,
        scheduler=dataclasses.replace(options.scheduler, rows=memory.plan.rows),
        execute=dataclasses.replace(options.execute, threads=granted.count),
    )
    limits = Limits(context=context, vocab=program.vocab, pool_tokens=memory.plan.pool_tokens)
    members = tuple(backend.members(program, announced, options.cache.kv_format))
    return Blueprint(checkpoint, program, options, granted, memory, seen, limits, members, backend)


def _memory(
    checkpoint: Checkpoint,
    program: Program,
    backend: Backend,
    announced: Mapping[str, Announced],
    options: Options,
    context: int,
    threads: int,
    seen: Seen | None,
) -> Memory:
    """Every part's bytes, and the pool that the plan has room for. OptionError where it is too little."""
    kv, budget = program.kv, options.scheduler.budget
    one = PoolShape(1, kv.slots, kv.kv_heads, kv.dim, options.cache.kv_format)
    at_once = min(budget, logits_at_once(program.vocab))
    weights = backend.weight_bytes(announced)
    buffers = backend.buffer_bytes(program, announced, Largest(budget, budget, at_once, threads, context))
    now = resident()
    own, total = (now.anonymous, now.total) if now is not None else (0, 0)
    free = granted_memory()
    needs = Needs(
        process=-(-(total + GROWTH) // GRAIN) * GRAIN,
        weights=weights,
        buffers=buffers,
        block=one.block_bytes,
        windows=tuple(group.window for group in kv.groups),
        context=context,
        trained=checkpoint.spec.context,
        packing=max(t.nbytes for t in checkpoint.source.tensors.values()),
        slack=GRAIN,
    )
    plan = plan_memory(
        needs,
        granted=own + free if free else 0,
        bound=options.memory_bytes,
        pool_bytes=options.cache.pool_bytes,
        rows=options.scheduler.rows,
        default_rows=ROWS,
        demand=None if seen is None else seen.demand(),
        automatic=options.automatic,
    )
    return Memory(
        stored=sum(t.nbytes for t in checkpoint.source.tensors.values()),
        weights=weights,
        buffers=buffers,
        pool=dataclasses.replace(one, blocks=plan.blocks),
        token=len(kv.groups) * one.block_bytes // BLOCK,
        plan=plan,
    )


def _backend(options: ExecuteOptions) -> Backend:
    """The backend of that name; importing it brings what it computes with. OptionError where it cannot run here."""
    if options.backend == "torch":
        try:
            from headrace.program.torch_backend import TorchBackend
        except ModuleNotFoundError as error:
            raise OptionError(
                "backend torch needs PyTorch: pip install 'headrace[torch]'; or leave the option out", "backend"
            ) from error
        return TorchBackend()
    from headrace.program.native_backend import NativeBackend

    try:
        return NativeBackend(options.isa, fuse=options.fusion)
    except ValueError as error:
        raise OptionError(str(error), "isa") from error


def _let_threads_sleep() -> None:
    """Tell OpenMP's threads to sleep at barriers, where the user has not said otherwise: spinning ones were eight times
    as slow beside other busy processes (docs/decisions/0004). OpenMP reads it when PyTorch is first imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Loaded:
    """A model in memory with its engine: judges requests, starts and ends them."""

    def __init__(
        self, plan: Blueprint, engine: Engine, gate: Gate, grammars: Compiler, keeper: LoadKeeper | None = None
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._gate = gate
        self._grammars = grammars
        self._keeper = keeper
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self.plan.checkpoint.name

    @property
    def checkpoint(self) -> Checkpoint:
        return self.plan.checkpoint

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.plan.context

    @property
    def vocab(self) -> int:
        """Width of the logits: every token id is below it."""
        return self.plan.limits.vocab

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.plan.program.width

    @property
    def pooling(self) -> str:
        """How embeddings are pooled where a request does not say: as the model's files do, else `mean`."""
        return self.checkpoint.pooling or "mean"

    @property
    def threads(self) -> int:
        """Compute threads."""
        return self.plan.threads.count

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it lives."""
        error = self._engine.failure()
        return None if error is None else str(error) or repr(error)

    def new_id(self) -> int:
        return next(self._ids)

    def admit(self, prompt: Sequence[int], params: SamplingParams, *, param: str = "prompt") -> SamplingParams:
        """The parameters with every default filled in. RequestError where the request cannot be served; `param` is what
        it calls the prompt."""
        return admit(prompt, params, limits=self.plan.limits, defaults=self.checkpoint.generation, param=param)

    def compiled(self, params: SamplingParams) -> Compiled | None:
        """The grammar of these parameters, for whoever is to hold it while a request runs. May take a second where
        nobody holds it. RequestError where it cannot be honoured."""
        return None if params.grammar is None else self._grammars.compiled(params.grammar)

    def cut(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """What is computed of a prompt, by admitted parameters."""
        return list(cut(prompt, params, self.plan.limits))

    def reads(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """How many tokens of a prompt are computed, by admitted parameters."""
        return reads(len(prompt), params, self.plan.limits)

    def ensure_room(self, requests: int, tokens: int) -> None:
        """OverloadedError where the queue has no room for so many more choices, of prompts of so many tokens."""
        self._gate.judge(requests, tokens, self._engine.stats())

    def submit(self, request: int, prompt: Sequence[int], params: SamplingParams, tenant: str = "") -> None:
        """Start an admitted request, whatever the queue. EngineDeadError where nobody would serve it."""
        if self._keeper is not None:
            self._keeper.begin(request, len(prompt), params.n)
        try:
            self._engine.post(Submit(request, tuple(prompt), params, time.monotonic(), tenant))
        except BaseException:
            if self._keeper is not None:
                self._keeper.forget(request)
            raise

    def pin(self, prefix: Sequence[int]) -> None:
        """Compute this prefix soon, and keep it."""
        params = self.admit(prefix, SamplingParams(temperature=0, max_tokens=1))
        self._engine.post(Submit(self.new_id(), tuple(prefix), params, time.monotonic(), pin=True))

    def abort(self, request: int) -> None:
        """End a request early; nothing happens where it has ended."""
        self._engine.post(Abort(request))

    def stats(self) -> Stats:
        return dataclasses.replace(self._engine.stats(), refused=self._gate.refused)

    def close(self) -> None:
        """Stop the engine and give its memory back. What is still running ends as aborted."""
        self._engine.close()

    def stop(self) -> None:
        """`close` without waiting, for finalizers."""
        self._engine.stop()


def load(
    model: str | Path,
    *,
    deliver: Callable[[list[Delta]], None],
    progress: Progress | None = None,
    planned: Callable[[Blueprint], None] | None = None,
    **options: Any,
) -> Loaded:
    """Find, plan and load a model. `deliver` gets the deltas of each step, on the engine's thread. `planned` is called
    once everything is sized, before weights are read.

    Options are those of `config.Options`, flat. Raises ModelNotFoundError, ModelFileError or OptionError.
    """
    tell = progress or silent
    chosen = Options.of(**options)
    if chosen.execute.backend == "torch":
        _let_threads_sleep()
    plan = plan_engine(resolve(model, progress=tell), chosen)
    if planned is not None:
        planned(plan)
    program, checkpoint = plan.program, plan.checkpoint
    tier = _tier(plan.options.cache)
    pinned = _pinned(plan)
    if pinned:
        plan = dataclasses.replace(plan, limits=_beside(pinned, plan))
    pool = Pool(plan.memory.pool)
    loading = plan.options.loading
    store = (
        WeightCache(checkpoint, most_bytes=loading.weight_cache_bytes, threads=plan.threads.count)
        if loading.weight_cache
        else None
    )

    def taken(done: int, total: int) -> None:
        checkpoint.source.forget()  # a weight that was taken over is not needed in memory twice
        tell(f"loading {checkpoint.name}", done, total)

    weights = load_weights(checkpoint)
    runner = plan.backend.load(program, weights, pool, plan.threads.count, taken, store)
    log.info("%s is loaded: %s", checkpoint.name, resident() or "its memory is not known")
    grammars = Compiler(checkpoint.tokenizer, program.vocab, checkpoint.eos)
    scheduler = _scheduler(plan, tier, grammars)
    sampling = NativeSampling(plan.options.execute.isa or isas()[0])
    executor = LocalExecutor(runner, pool, program.kv, program.vocab, sampling, tier)
    keeper = LoadKeeper(checkpoint, plan.context) if chosen.past_load else None
    engine = Engine(
        executor,
        scheduler,
        deliver=deliver if keeper is None else keeper.watching(deliver),
        masks=Filler(program.vocab, checkpoint.eos),
        ended=None if keeper is None else keeper.save,
    )
    gate = Gate(plan.options.scheduler.queue_requests, plan.options.scheduler.queue_tokens)
    loaded = Loaded(plan, engine, gate, grammars, keeper)
    if pinned:
        loaded.pin(pinned)
    return loaded


def _scheduler(plan: Blueprint, tier: DiskTier | None, grammars: Compiler) -> Scheduler:
    checkpoint = plan.checkpoint
    reuse, step_ms = plan.options.cache.prefix_cache, plan.options.scheduler.step_ms
    blocks = Blocks(plan.memory.pool.blocks, [group.window for group in plan.program.kv.groups], lasting=reuse)
    return Scheduler(
        blocks,
        prefix=PrefixCache(blocks, _facts(plan, tier), tier),
        reuse=reuse,
        pace=Pace(None if step_ms is None else step_ms / 1000),
        budget=plan.options.scheduler.budget,
        rows=plan.memory.plan.rows,
        context=plan.context,
        window=plan.limits.window,
        eos=checkpoint.eos,
        text=lambda params: _text(checkpoint, params),
        constraint=grammars.constraint,
        policy=_policy(plan.options.scheduler, plan.memory.plan.rows),
    )


def _policy(options: SchedulerOptions, rows: int) -> Policy:
    batch = min(options.batch, rows)
    match options.policy:
        case "static":
            return Static(batch)
        case "dynamic":
            return Dynamic(batch, (options.max_wait_ms or MAX_WAIT_MS) / 1000)
    return Continuous()


def _tier(options: CacheOptions) -> DiskTier | None:
    if options.cache_dir is None:
        return None
    try:
        return DiskTier(Path(options.cache_dir).expanduser(), options.cache_dir_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"cache_dir {options.cache_dir} cannot be used: {why}", "cache_dir") from error


def _pinned(plan: Blueprint) -> list[int]:
    """The tokens of what `pin_prefix` names. OptionError where it cannot be used."""
    name = plan.options.cache.pin_prefix
    if name is None:
        return []
    try:
        tokens = _prefix(Path(name).expanduser(), plan.checkpoint.tokenizer)
    except (OSError, ValueError, RuntimeError, RequestError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"pin_prefix {name} cannot be used: {why}", "pin_prefix") from error
    most = _most_pinned(plan)
    if not BLOCK <= len(tokens) <= most:
        raise OptionError(
            f"pin_prefix {name} has {len(tokens)} tokens; {BLOCK} to {most} can be kept, so that the pool has room for "
            "as many beside them",
            "pin_prefix",
        )
    return tokens


def _prefix(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text, or of messages where the file's name says so. OSError, ValueError, RecursionError,
    RequestError."""
    with path.open(encoding="utf-8") as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    if path.suffix == ".json":
        return tokenizer.chat(json.loads(text), add_generation_prompt=False)
    return tokenizer.encode(text)


def _most_pinned(plan: Blueprint) -> int:
    """Most tokens that can be kept for good: as many must fit beside them, or nobody could ask for them."""
    count, windows = plan.memory.pool.blocks, [group.window for group in plan.program.kv.groups]
    whole = Blocks(count, windows)

    def too_many(tokens: int) -> bool:
        left = count - whole.need(tokens)
        return left < 1 or Blocks(left, windows).most_tokens < tokens

    return bisect_left(range(1, plan.context), True, key=too_many)


def _beside(pinned: Sequence[int], plan: Blueprint) -> Limits:
    """What one engine can hold that never gives these tokens up."""
    windows = [group.window for group in plan.program.kv.groups]
    left = plan.memory.pool.blocks - Blocks(1, windows).need(len(pinned))
    return dataclasses.replace(plan.limits, pool_tokens=Blocks(left, windows).most_tokens)


def _facts(plan: Blueprint, tier: DiskTier | None) -> bytes:
    """All that cached keys and values depend on, but tokens. The model's files are read whole for it where anything
    outlives the process."""
    model = "" if tier is None else digest_of(list(plan.checkpoint.source.files))
    facts = (model, plan.checkpoint.spec, plan.context, plan.options.cache.kv_format, plan.backend.arithmetic)
    return repr(facts).encode()


def _text(checkpoint: Checkpoint, params: SamplingParams) -> TextStream:
    return TextStream(
        checkpoint.tokenizer,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
