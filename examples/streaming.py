"""Two answers at once from one engine, each printed token by token as its own task receives it."""

import asyncio
import sys

from asyncllm import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"


async def answer(engine: AsyncEngine, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    async for delta in engine.stream(messages, SamplingParams(max_tokens=40)):
        print(f"[{question}] {delta.text!r}", flush=True)
        if delta.usage is not None:
            print(f"[{question}] done: {delta.finish_reason}, {delta.usage.completion_tokens} tokens")


async def main() -> None:
    async with AsyncEngine(MODEL) as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(answer(engine, "What is the capital of France?"))
        tasks.create_task(answer(engine, "Name three colours."))


asyncio.run(main())
