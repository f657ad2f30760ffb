"""JSON out of text, into a Pydantic model: the output has the model's form, whatever the language model is."""

import asyncio
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from asyncllm import AsyncEngine, SamplingParams, StructuredOutput

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
LETTERS = [
    "Hi, it's Ada. The kettle I got last Monday leaks, and I'd like my 35 euros back.",
    "Bert here: two of the six glasses were broken, please send new ones.",
]


class Complaint(BaseModel):
    customer: Annotated[str, Field(max_length=20)]
    product: Annotated[str, Field(max_length=20)]
    wish: Literal["refund", "replacement", "other"]
    pieces: Annotated[int, Field(ge=1, le=99)]


async def read(engine: AsyncEngine, letter: str) -> Complaint:
    messages = [{"role": "user", "content": f"Fill in a form about this letter, as JSON.\n\n{letter}"}]
    params = SamplingParams(temperature=0, max_tokens=200, structured_output=StructuredOutput.from_model(Complaint))
    done = await engine.generate(messages, params)
    print(done.text)
    complaint: Complaint = done.parsed
    return complaint


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        for complaint in await asyncio.gather(*(read(engine, letter) for letter in LETTERS)):
            print(f"complaint of {complaint.customer!r}: {complaint.wish} for {complaint.pieces}")


asyncio.run(main())
