"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from asyncllm.api.completions import as_prompts
from asyncllm.api.errors import InvalidRequest
from asyncllm.api.exchange import Reply, json_reply
from asyncllm.api.protocol.embeddings import EmbeddingRequest
from asyncllm.api.serving import Call, Serving


async def create_embeddings(serving: Serving, call: Call) -> Reply:
    """A vector for each text."""
    body: EmbeddingRequest = call.body
    model = serving.name(body.model)
    texts = as_prompts(body.input, "input")
    if len(texts) > serving.settings.max_prompts:
        raise InvalidRequest(f"at most {serving.settings.max_prompts} texts a request", param="input")
    ticket = serving.enter(len(texts))
    try:
        found = await serving.engine.embed(texts)
    finally:
        ticket.release()
    tokens = sum(each.prompt_tokens for each in found)
    vectors = [_shortened(each.embedding, body.dimensions) for each in found]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return json_reply({"object": "list", "data": data, "model": model, "usage": usage})


def _shortened(vector: Sequence[float], dimensions: int | None) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The first numbers of a vector, made of length 1 again."""
    whole = np.asarray(vector, np.float32)
    if dimensions is None:
        return whole
    if dimensions > len(whole):
        raise InvalidRequest(f"dimensions may be at most {len(whole)}, got {dimensions}", param="dimensions")
    part = whole[:dimensions]
    return part / max(float(np.linalg.norm(part)), 1e-12)


def _encoded(vector: np.ndarray[tuple[int], np.dtype[np.float32]], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
