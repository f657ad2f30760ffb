"""What every generating endpoint does with a stream of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.api.admission import Ticket
from asyncllm.api.errors import ApiError, api_error
from asyncllm.api.exchange import Events, Reply, event_reply
from asyncllm.api.serving import Serving, all_of
from asyncllm.engine.async_engine import TokenStream
from asyncllm.results import Completion, FinishReason, TokenDelta


class Generation:
    """The streams of one request: their place in the queue, their metrics, and what is given back at the end."""

    def __init__(
        self, serving: Serving, streams: Sequence[TokenStream], ticket: Ticket, *, request_id: str, server_limits: bool
    ) -> None:
        """`request_id`: what the log calls the request. `server_limits`: it is the server's timeout that their deadline
        stands for."""
        self.streams = streams
        self._ticket = ticket
        self._request_id = request_id
        self._server_limits = server_limits
        self._observations = [serving.metrics.request() for _ in streams]
        self._open = set(range(len(streams)))  # positions of those that were not seen to end

    async def completions(self) -> list[Completion]:
        """The whole answers; all is given back then."""
        try:
            done = await all_of([stream.result() for stream in self.streams])
        except BaseException:
            self._fail()
            raise
        finally:
            self._ticket.release()
        self._open.clear()
        for observation, completion in zip(self._observations, done, strict=True):
            observation.end(completion.metrics, completion.usage, completion.finish_reason)
            if (failure := self._limit(completion.finish_reason)) is not None:
                raise failure
        return done

    async def start(self) -> None:
        """Submit; what is refused is raised here, and all is given back."""
        try:
            await all_of([stream.start() for stream in self.streams])
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Nobody wants the answers any more."""
        self._ticket.release()
        self._fail()
        for stream in self.streams:
            await stream.aclose()

    def reply(self, events: Events) -> Reply:
        """A reply of events; the generation ends with it."""
        reply = event_reply(events)
        reply.held.push_async_callback(self.abandon)
        return reply

    def seen(self, delta: TokenDelta, position: int = 0) -> ApiError | None:
        """A delta leaves. Returns 504 where the server's own limit is its end, which is no end of an answer then."""
        self._observations[position].tokens(len(delta.token_ids))
        return None if delta.finish_reason is None else self._seen_last(delta, position)

    def failure(self, error: Exception) -> ApiError:
        """What a client is told when a stream fails; the log gets what it is not told."""
        return api_error(error, self._request_id)

    def counter(self, position: int) -> Callable[[int], None]:
        """Counts tokens that leave, in place of `seen`, where they are not the last ones of their choice."""
        return self._observations[position].tokens

    def _seen_last(self, delta: TokenDelta, position: int) -> ApiError | None:
        reason = delta.finish_reason
        assert reason is not None
        if delta.usage is not None:
            self._open.discard(position)
            self._observations[position].end(self.streams[position].metrics, delta.usage, reason)
        return self._limit(reason)

    def _limit(self, reason: FinishReason) -> ApiError | None:
        if reason is FinishReason.DEADLINE and self._server_limits:
            return ApiError(504, "The request took longer than this server allows.", code="timeout")
        return None

    def _fail(self) -> None:
        for position in self._open:
            self._observations[position].end(None, None, FinishReason.ABORT)
        self._open.clear()
