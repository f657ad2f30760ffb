"""A host's own say between two tokens: an async logits processor that asks for advice; a hook that sees each token."""

import asyncio
import contextvars
import sys

import numpy as np

from asyncllm import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
FORBIDDEN = {"acme": range(20, 30), "globex": range(0)}


async def advice(tenant: str) -> range:
    await asyncio.sleep(0.005)  # stands for a call over the network; other requests go on meanwhile
    return FORBIDDEN[tenant]


async def obey(token_ids: list[int], logits: np.ndarray) -> None:
    """Runs in the request's own event loop, and sees its context variables."""
    logits[list(await advice(TENANT.get()))] = float("-inf")


async def answer(engine: AsyncEngine, tenant: str) -> None:
    TENANT.set(tenant)
    seen: list[int] = []
    params = SamplingParams(max_tokens=16, seed=7, logits_processors=[obey], on_token=seen.append)
    done = await engine.generate("The weather today is", params)
    kept = not set(FORBIDDEN[tenant]) & set(seen)
    print(f"{tenant}: {done.text!r} ({len(seen)} tokens, advice kept: {kept})")


async def main() -> None:
    async with AsyncEngine(MODEL) as engine:
        await asyncio.gather(answer(engine, "acme"), answer(engine, "globex"))


asyncio.run(main())
