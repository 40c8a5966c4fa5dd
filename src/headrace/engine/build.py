"""Puts an engine together: files, program, memory, executor, scheduler. The one place that knows all the parts."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cache.blocks import Blocks
from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.config import ExecuteOptions, Options
from headrace.engine.admission import Limits, admit
from headrace.engine.loop import Engine
from headrace.errors import ModelFileError, OptionError
from headrace.execute.local import LocalExecutor, logits_at_once
from headrace.hardware import Granted, granted_memory, resident, threads
from headrace.loading.checkpoint import Checkpoint, load_weights, open_checkpoint
from headrace.loading.progress import Progress, silent
from headrace.loading.resolve import resolve
from headrace.loading.weight_cache import WeightCache
from headrace.native import isas
from headrace.native.sampling import NativeSampling
from headrace.params import SamplingParams
from headrace.paths import cache_home
from headrace.program.backend import Announced, Backend, Member
from headrace.program.decoder import write_program
from headrace.program.program import Program
from headrace.scheduler.messages import Abort, Delta, Submit
from headrace.scheduler.scheduler import Scheduler, Stats
from headrace.tokenize.stream import TextStream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes, known before a weight is read."""

    stored: int
    """Weights as the files hold them."""
    weights: int
    """Weights as the backend keeps them."""
    buffers: int
    """The program's buffers in a step of `budget` tokens, all of them wanted, as log-probabilities of prompts may want
    them: `program.buffers.peak_bytes`."""
    pool: PoolShape
    token: int
    """KV of one token over all layers."""


@dataclass(frozen=True)
class Blueprint:
    """A model and its options, resolved: all that can be known of an engine before weights are read."""

    checkpoint: Checkpoint
    program: Program
    options: Options
    """With `context` and `threads` filled in."""
    threads: Granted
    memory: Memory
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
    options = dataclasses.replace(
        options, context=context, execute=dataclasses.replace(options.execute, threads=granted.count)
    )
    try:
        program = write_program(checkpoint.spec, checkpoint.parts, context)
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error
    backend = _backend(options.execute)
    if reason := backend.lacks(program):
        raise ModelFileError(path, f"{reason}; backend torch can run it")
    shape, blocks = _pool(program, options, context)
    budget = options.scheduler.budget
    tensors = checkpoint.source.tensors
    announced = {name: Announced(p.shape, tensors[p.tensor].format) for name, p in checkpoint.parts.items()}
    memory = Memory(
        stored=sum(t.nbytes for t in checkpoint.source.tensors.values()),
        weights=backend.weight_bytes(announced),
        buffers=backend.buffer_bytes(program, announced, budget, budget, min(budget, logits_at_once(program.vocab))),
        pool=shape,
        token=len(program.kv.groups) * shape.block_bytes // BLOCK,
    )
    limits = Limits(context=context, vocab=program.vocab, pool_tokens=blocks.most_tokens)
    members = tuple(backend.members(program, announced, options.cache.kv_format))
    return Blueprint(checkpoint, program, options, granted, memory, limits, members, backend)


def _pool(program: Program, options: Options, context: int) -> tuple[PoolShape, Blocks]:
    """The pool as asked for; else what `rows` full contexts need, within a quarter of the memory granted."""
    kv = program.kv
    one = PoolShape(1, kv.slots, kv.kv_heads, kv.dim, options.cache.kv_format)
    windows = [group.window for group in kv.groups]
    if options.cache.pool_bytes is not None:
        if 0 < (most := granted_memory()) < options.cache.pool_bytes:
            raise OptionError(
                f"pool_bytes is {options.cache.pool_bytes}, more than the {most} that are free", "pool_bytes"
            )
        count = options.cache.pool_bytes // one.block_bytes
    else:
        per_context = Blocks(1, windows).need(context)
        count = min(options.scheduler.rows * per_context, granted_memory() // 4 // one.block_bytes)
    if count < len(windows):
        raise OptionError(
            f"pool_bytes must be at least {len(windows) * one.block_bytes} for this model: a block of {BLOCK} tokens "
            f"for each of its {len(windows)} groups of layers",
            "pool_bytes",
        )
    return dataclasses.replace(one, blocks=count), Blocks(count, windows)


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

    def __init__(self, plan: Blueprint, engine: Engine) -> None:
        self.plan = plan
        self._engine = engine
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
    def threads(self) -> int:
        """Compute threads."""
        return self.plan.threads.count

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it lives."""
        error = self._engine.error
        return None if error is None else str(error) or repr(error)

    def new_id(self) -> int:
        return next(self._ids)

    def admit(self, prompt: Sequence[int], params: SamplingParams, *, param: str = "prompt") -> SamplingParams:
        """The parameters with every default filled in. RequestError where the request cannot be served; `param` is what
        it calls the prompt."""
        return admit(prompt, params, limits=self.plan.limits, defaults=self.checkpoint.generation, param=param)

    def submit(self, request: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Start an admitted request. EngineDeadError where nobody would serve it."""
        self._engine.post(Submit(request, tuple(prompt), params, time.monotonic()))

    def abort(self, request: int) -> None:
        """End a request early; nothing happens where it has ended."""
        self._engine.post(Abort(request))

    def stats(self) -> Stats:
        return self._engine.stats()

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
    **options: Any,
) -> Loaded:
    """Find, plan and load a model. `deliver` gets the deltas of each step, on the engine's thread.

    Options are those of `config.Options`, flat. Raises ModelNotFoundError, ModelFileError or OptionError.
    """
    tell = progress or silent
    chosen = Options.of(**options)
    if chosen.execute.backend == "torch":
        _let_threads_sleep()
    plan = plan_engine(resolve(model, progress=tell), chosen)
    program, checkpoint = plan.program, plan.checkpoint
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
    scheduler = Scheduler(
        Blocks(plan.memory.pool.blocks, [group.window for group in program.kv.groups]),
        budget=plan.options.scheduler.budget,
        rows=plan.options.scheduler.rows,
        context=plan.context,
        eos=checkpoint.eos,
        text=lambda params: _text(checkpoint, params),
    )
    sampling = NativeSampling(plan.options.execute.isa or isas()[0])
    executor = LocalExecutor(runner, pool, program.kv, program.vocab, sampling)
    return Loaded(plan, Engine(executor, scheduler, deliver=deliver))


def _text(checkpoint: Checkpoint, params: SamplingParams) -> TextStream:
    return TextStream(
        checkpoint.tokenizer,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
