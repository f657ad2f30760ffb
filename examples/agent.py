"""An agent loop: each turn runs two tools at once, while another stream of the same engine goes on beside it."""

import asyncio
import sys

from asyncllm import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
PARAMS = SamplingParams(max_tokens=32, temperature=0)


async def weather(city: str) -> str:
    await asyncio.sleep(0.2)  # stands for a call over the network
    return f"Weather in {city}: 18 degrees, light rain."


async def calendar(day: str) -> str:
    await asyncio.sleep(0.3)
    return f"Calendar for {day}: a walk in the park at noon."


async def agent(engine: AsyncEngine, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    for turn in range(2):
        thought = await engine.generate(messages, PARAMS)
        print(f"agent, turn {turn + 1}: {thought.text!r}")
        found = await asyncio.gather(weather("Paris"), calendar("Sunday"))
        messages += [
            {"role": "assistant", "content": thought.text},
            {"role": "user", "content": "Tools say: " + " ".join(found) + " Go on."},
        ]
    print(f"agent, answer: {(await engine.generate(messages, PARAMS)).text!r}")


async def story(engine: AsyncEngine) -> None:
    async for delta in engine.stream("Once upon a time", SamplingParams(max_tokens=60)):
        print(f"story: {delta.text!r}")


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        await asyncio.gather(agent(engine, "Shall I take an umbrella on Sunday?"), story(engine))


asyncio.run(main())
