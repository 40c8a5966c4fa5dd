"""Many short requests: is resident memory flat, and does everybody get an answer?

    python bench/soak.py MODEL [--requests 10000] [--at-once 100]

Prompts of 1 to 60 tokens and answers of 1 to 12, greedy and sampled, some with log-probabilities, some given up
midway. Prints the resident memory after each tenth; fails where the last tenth ends more than 1 % above the second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import closing

from headrace import AsyncLLM, SamplingParams
from headrace.hardware import resident


async def ask(llm: AsyncLLM, number: int) -> None:
    choose = random.Random(number)
    prompt = [choose.randrange(3, 1000) for _ in range(choose.randint(1, 60))]
    params = SamplingParams(
        temperature=choose.choice([0.0, 0.8]),
        top_p=choose.choice([1.0, 0.9]),
        max_tokens=choose.randint(1, 12),
        logprobs=choose.choice([None, None, 3]),
        frequency_penalty=choose.choice([0.0, 0.0, 0.5]),
        ignore_eos=True,
    )
    leaves = choose.random() < 0.1
    async for _ in await llm.stream(prompt, params):
        if leaves:
            return


async def soak(model: str, requests: int, at_once: int) -> list[int]:
    found: list[int] = []
    with closing(await AsyncLLM.load(model, context=512)) as llm:
        numbers = iter(range(requests))
        done = 0

        async def worker() -> None:
            nonlocal done
            for number in numbers:
                await ask(llm, number)
                done += 1
                if done % (requests // 10) == 0:
                    now = resident()
                    assert now is not None
                    found.append(now.total)
                    print(f"| {done} | {now.total / 1e6:.1f} |", flush=True)

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return found


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--requests", type=int, default=10_000)
    ask.add_argument("--at-once", type=int, default=100)
    args = ask.parse_args()
    print("| requests | MB resident |\n|--:|--:|")
    found = asyncio.run(soak(args.model, args.requests, args.at_once))
    return int(found[-1] > found[1] * 1.01)


if __name__ == "__main__":
    sys.exit(main())
