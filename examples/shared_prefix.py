"""Fifty concurrent requests with one system prompt: its blocks are computed once, and the others reuse them."""

import asyncio
import sys
import time

from asyncllm import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
SYSTEM = "You are a clerk of a library. " + " ".join(f"Rule {n}: shelf {n} holds {n} books." for n in range(1, 21))


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        start = time.perf_counter()
        completions = await asyncio.gather(
            *(
                engine.generate(
                    [
                        {"role": "system", "content": SYSTEM},
                        {"role": "user", "content": f"How many books are on shelf {n % 20 + 1}?"},
                    ],
                    SamplingParams(max_tokens=8, temperature=0),
                )
                for n in range(50)
            )
        )
        seconds = time.perf_counter() - start
        prompt = sum(completion.usage.prompt_tokens for completion in completions)
        cached = sum(completion.usage.cached_tokens for completion in completions)
        print(f"50 requests in {seconds:.1f} s; {cached} of {prompt} prompt tokens came from the cache")
        print(f"prefix hit rate: {engine.statistics().prefix_hit_rate:.0%}")


asyncio.run(main())
