"""The real clients against each server: blocking and async, streamed and whole."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.api.servers import Running

MESSAGES = [{"role": "user", "content": "Name three rivers."}]


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def async_client(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(server: Running) -> None:
    with client(server) as openai_client:
        assert [model.id for model in openai_client.models.list()] == ["shadow"]
        assert openai_client.models.retrieve("shadow").id == "shadow"


def test_chat_streamed_and_whole_agree(server: Running) -> None:
    with client(server) as openai_client:
        whole = openai_client.chat.completions.create(model="shadow", messages=MESSAGES, max_tokens=12, temperature=0)
        stream = openai_client.chat.completions.create(
            model="shadow",
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_chat_async(server: Running) -> None:
    async with async_client(server) as openai_client:
        whole = await openai_client.chat.completions.create(
            model="shadow", messages=MESSAGES, max_tokens=12, temperature=0
        )
        async with openai_client.chat.completions.stream(
            model="shadow", messages=MESSAGES, max_tokens=12, temperature=0
        ) as stream:
            async for _ in stream:
                pass
            final = stream.current_completion_snapshot  # the final one refuses what ended by its length
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].message.role == "assistant"


def test_completions(server: Running) -> None:
    with client(server) as openai_client:
        whole = openai_client.completions.create(model="shadow", prompt=["One", "Two"], max_tokens=6, temperature=0)
        texts = ["", ""]
        for chunk in openai_client.completions.create(
            model="shadow", prompt=["One", "Two"], max_tokens=6, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts


async def test_completions_async(server: Running) -> None:
    async with async_client(server) as openai_client:
        whole = await openai_client.completions.create(model="shadow", prompt="One", max_tokens=6, temperature=0)
        stream = await openai_client.completions.create(
            model="shadow", prompt="One", max_tokens=6, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text


def test_responses(server: Running) -> None:
    with client(server) as openai_client:
        first = openai_client.responses.create(
            model="shadow", input="Name a river.", max_output_tokens=8, temperature=0, instructions="Be brief."
        )
        assert first.status == "incomplete"
        assert first.usage is not None
        assert first.usage.output_tokens == 8
        with openai_client.responses.stream(
            model="shadow", input="Name a river.", max_output_tokens=8, temperature=0, instructions="Be brief."
        ) as stream:
            kinds = [event.type for event in stream]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-1] == "response.incomplete"
        second = openai_client.responses.create(
            model="shadow", input="And another?", previous_response_id=first.id, max_output_tokens=8
        )
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        assert openai_client.responses.retrieve(first.id).output_text == first.output_text
        assert len(openai_client.responses.input_items.list(first.id).data) == 1
        openai_client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="There is no response"):
            openai_client.responses.create(model="shadow", input="And?", previous_response_id=first.id)


async def test_responses_async(server: Running) -> None:
    async with async_client(server) as openai_client:
        whole = await openai_client.responses.create(model="shadow", input="Hi", max_output_tokens=8, temperature=0)
        stream = await openai_client.responses.create(
            model="shadow", input="Hi", max_output_tokens=8, temperature=0, stream=True
        )
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text


def test_anthropic(server: Running) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic_client:
        whole = anthropic_client.messages.create(
            model="shadow", max_tokens=8, messages=MESSAGES, system="Be brief.", extra_body={"temperature": 0}
        )
        with anthropic_client.messages.stream(
            model="shadow", max_tokens=8, messages=MESSAGES, system="Be brief.", extra_body={"temperature": 0}
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        count = anthropic_client.messages.count_tokens(model="shadow", messages=MESSAGES, system="Be brief.")
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text == final.content[0].text
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == final.usage.output_tokens == 8
    cached = whole.usage.cache_read_input_tokens or 0
    assert whole.usage.input_tokens + cached == count.input_tokens


async def test_anthropic_async(server: Running) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic_client:
        whole = await anthropic_client.messages.create(
            model="shadow", max_tokens=8, messages=MESSAGES, extra_body={"temperature": 0}
        )
        stream = await anthropic_client.messages.create(
            model="shadow", max_tokens=8, messages=MESSAGES, stream=True, extra_body={"temperature": 0}
        )
        text = "".join(
            [
                event.delta.text
                async for event in stream
                if event.type == "content_block_delta" and event.delta.type == "text_delta"
            ]
        )
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await anthropic_client.messages.create(model="other", max_tokens=8, messages=MESSAGES)
    assert whole.content[0].text == text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"messages": "x"}, openai.BadRequestError),
        ({"max_tokens": 10**8, "messages": [{"role": "user", "content": "word " * 4000}]}, openai.BadRequestError),
    ],
)
def test_errors(server: Running, change: dict[str, object], error: type[openai.APIStatusError]) -> None:
    with client(server) as openai_client, pytest.raises(error) as caught:
        openai_client.chat.completions.create(**{"model": "shadow", "messages": MESSAGES} | change)  # type: ignore[call-overload]
    assert isinstance(caught.value.body, dict)
    assert isinstance(caught.value.body["message"], str)


def test_embeddings(tiny_server: Running) -> None:
    with client(tiny_server) as openai_client:
        decoded = openai_client.embeddings.create(model="tiny", input=["One", "Two"])  # base64 on the wire
        plain = openai_client.embeddings.create(model="tiny", input="Two", encoding_format="float")
        short = openai_client.embeddings.create(model="tiny", input="Two", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            openai_client.embeddings.create(model="tiny", input="Two", dimensions=1000)
    assert [item.index for item in decoded.data] == [0, 1]
    assert decoded.data[1].embedding == pytest.approx(plain.data[0].embedding)
    assert len(plain.data[0].embedding) == 64
    assert len(short.data[0].embedding) == 8
    assert sum(value * value for value in short.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0
