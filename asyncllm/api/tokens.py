"""/tokenize and /detokenize."""

from __future__ import annotations

from asyncllm.api.chat_job import chat_tools, template_messages
from asyncllm.api.errors import InvalidRequest
from asyncllm.api.exchange import Reply, json_reply
from asyncllm.api.protocol.tokens import DetokenizeRequest, TokenizeRequest
from asyncllm.api.serving import Call, Serving


async def tokenize(serving: Serving, call: Call) -> Reply:
    """The ids of a text or of messages."""
    body: TokenizeRequest = call.body
    serving.name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        ids = await serving.engine.tokenize(body.prompt)
    else:
        variables = dict(body.chat_template_kwargs or {})
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        ids = await serving.engine.tokenize(
            template_messages(body.messages or []),
            tools=list(chat_tools(body.tools, None, None).tools) or None,
            chat_template_kwargs=variables,
            continue_final_message=bool(body.continue_final_message),
        )
    return json_reply({"count": len(ids), "max_model_len": serving.model.max_model_len, "tokens": ids})


async def detokenize(serving: Serving, call: Call) -> Reply:
    """The text of ids."""
    body: DetokenizeRequest = call.body
    serving.name(body.model)
    text = await serving.engine.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_reply({"prompt": text})
