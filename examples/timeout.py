"""A time limit on an answer, with asyncio.timeout: the request ends, and its memory is free, when the block is left."""

import asyncio
import sys

from asyncllm import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
SECONDS = 1.0


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        text = ""
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        try:
            async with asyncio.timeout(SECONDS), engine.stream("Once upon a time", params) as stream:
                async for delta in stream:
                    text += delta.text
        except TimeoutError:
            print(f"stopped after {SECONDS} s with {len(text)} characters: {text[:60]!r}")
        print("blocks still held:", engine.statistics().blocks_used)
        again = await engine.generate("The engine still serves:", SamplingParams(max_tokens=8))
        print("next request:", again.finish_reason, repr(again.text))


asyncio.run(main())
