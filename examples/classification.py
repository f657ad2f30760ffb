"""Classification: the answer is one of the labels, and its log-probabilities say how sure the model is."""

import asyncio
import math
import sys

from asyncllm import AsyncEngine, SamplingParams, StructuredOutput

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
LABELS = ["positive", "negative", "neutral"]
PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=0, structured_output=StructuredOutput(choice=LABELS))
REVIEWS = [
    "The best soup I have ever had, and they were so kind!",
    "Cold food, loud music, and we waited for an hour.",
    "It is a restaurant in the main street.",
]


async def classify(engine: AsyncEngine, review: str) -> str:
    messages = [{"role": "user", "content": f"Is this review {', '.join(LABELS)}? Answer in one word.\n\n{review}"}]
    done = await engine.generate(messages, PARAMS)
    # What the model itself, free to write anything, thought of the label's tokens.
    likelihood = math.exp(sum(position.chosen.logprob for position in done.logprobs or ()))
    return f"label: {done.text} (likelihood {likelihood:.2g}) of {review!r}"


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        for line in await asyncio.gather(*(classify(engine, review) for review in REVIEWS)):
            print(line)


asyncio.run(main())
