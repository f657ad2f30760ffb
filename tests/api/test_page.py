"""The page in a real Chromium. Needs playwright (`dev` has it) and a Chromium: Debian's `chromium`, or playwright's own
(`python -m playwright install chromium`). The screenshots of `test_screenshots` are for people to look at."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.api import create_aiohttp_app
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from tests.api.page_app import PageApp, serve
from tests.inputs.toy_tokenizers import smollm2

playwright_api = pytest.importorskip("playwright.async_api", reason="needs playwright: pip install playwright")

pytestmark = pytest.mark.full

SCHEMES = ("light", "dark")
WIDE, NARROW = (1280, 860), (360, 740)
EXPECTED = ("(Unauthorized)", "(Bad Request)", "DISCONNECTED")  # what the tests bring about themselves
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    async with playwright_api.async_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):  # noqa: ASYNC240
            pytest.skip("needs Chromium: `apt-get install chromium`, or `python -m playwright install chromium`")
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox refuses root
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] * root)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    page: PageApp | web.Application, *, scheme: str = "light", size: tuple[int, int] = WIDE, **options: Any
) -> AsyncIterator[Any]:
    """The page in a browser window. What the browser complains of fails the test, but for `EXPECTED`."""
    complaints: list[str] = []
    app = page.app() if isinstance(page, PageApp) else page
    async with serve(app) as address, chromium() as browser:
        viewport = {"width": size[0], "height": size[1]}
        context = await browser.new_context(color_scheme=scheme, viewport=viewport, **options)
        window = await context.new_page()
        window.on("console", lambda message: complaints.append(message.text))
        window.on("pageerror", lambda error: complaints.append(str(error)))
        window.set_default_timeout(10_000)
        await window.goto(address)
        yield window
    assert [each for each in complaints if not any(expected in each for expected in EXPECTED)] == []


async def until(window: Any, expression: str) -> None:
    """Wait for a condition of the page. Its policy allows no `wait_for_function`, which calls eval in the page."""
    for _ in range(200):
        if await window.evaluate(expression):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"never true: {expression}")


async def shows(window: Any, name: str, text: str) -> None:
    """Wait for the text of an element."""
    await until(window, f"document.getElementById('{name}').textContent === '{text}'")


@asynccontextmanager
async def engine() -> AsyncIterator[AsyncEngine]:
    model = ShadowModel(latency=0.01)
    async with AsyncEngine(model, num_blocks=300, max_num_seqs=6, max_model_len=1000) as running:
        yield running


@asynccontextmanager
async def busy(running: AsyncEngine) -> AsyncIterator[None]:
    """Requests with a common prefix, more than there are rows."""

    async def ask(i: int) -> None:
        await running.generate([*range(3, 120), 200 + i], SamplingParams(max_tokens=700, ignore_eos=True))

    tasks = [asyncio.create_task(ask(i)) for i in range(9)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def say(window: Any, text: str) -> None:
    await window.fill("#prompt", text)
    await window.press("#prompt", "Enter")


async def test_an_answer_streams_and_the_chat_goes_on() -> None:
    async with engine() as running:
        page = PageApp(running, pieces=["Hel", "lo 🌶 <b>", "\n  x"], reasoning=["Hm", "m"], delay=0.3)
        async with opened(page) as window:
            await until(window, "document.title.startsWith('tiny-model')")
            await say(window, "Hi")
            await window.wait_for_selector(".message.streaming")
            assert await window.is_visible("#stop")
            assert not await window.is_visible("#send")
            await until(window, "document.querySelector('.message.assistant > .text').textContent === 'Hel'")
            await window.wait_for_selector(".message.assistant:not(.streaming)")
            assert await window.text_content(".message.assistant > .text") == "Hello 🌶 <b>\n  x"
            assert await window.text_content(".message.assistant details .text") == "Hmm"
            hint = await window.text_content(".message.assistant .hint")
            assert "5 tokens" in hint
            assert "4 of 9 prompt tokens cached" in hint
            assert "said: Hello" in await window.text_content("#announcer")
            await window.click("#settings summary")
            await window.fill("#temperature", "0.5")
            await window.fill("#seed", "7")
            await window.fill("#stop_strings", "END\n\n###")
            await window.fill("#system", "Be brief.")
            await say(window, "And?")
            await until(window, "document.querySelectorAll('.message.assistant .hint').length === 2")
    first, second = page.asked
    assert first == {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 512,
    }
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello 🌶 <b>\n  x"},
        {"role": "user", "content": "And?"},
    ]
    assert (second["temperature"], second["seed"], second["stop"]) == (0.5, 7, ["END", "###"])


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop(by: str) -> None:
    async with engine() as running:
        page = PageApp(running, pieces=["word "] * 500, delay=0.02)
        async with opened(page) as window:
            await say(window, "Hi")
            await until(window, "document.querySelector('.assistant > .text')?.textContent.includes('word')")
            await (window.click("#stop") if by == "button" else window.keyboard.press("Escape"))
            await window.wait_for_selector(".message.assistant:not(.streaming)")
            assert "stopped" in await window.text_content(".message.assistant .hint")
            assert await window.is_visible("#send")
            for _ in range(100):
                if page.left:
                    break
                await asyncio.sleep(0.02)
            assert page.left == ["Hi"], "the server sees the client go"
            page.pieces = ["ok"]
            await say(window, "Again")
            await until(window, "document.querySelectorAll('.message.assistant .hint').length === 2")
            assert page.asked[1]["messages"][1]["content"].startswith("word ")


async def test_a_new_chat_ends_the_old_one() -> None:
    async with engine() as running:
        page = PageApp(running, pieces=["word "] * 500, delay=0.02)
        async with opened(page) as window:
            await say(window, "Old")
            await window.wait_for_selector(".message.streaming")
            await window.click("#new-chat")
            assert await window.is_visible("#empty")
            page.pieces = ["ok"]
            await window.click("#examples button")
            await window.wait_for_selector(".message.assistant .hint")
            assert await window.evaluate("document.querySelectorAll('.message').length") == 2
    assert page.left == ["Old"]
    assert page.asked[1]["messages"] == [{"role": "user", "content": "Name three rivers and where they end."}]


async def test_errors_are_shown() -> None:
    async with engine() as running:
        page = PageApp(running, error="The engine has died.")
        async with opened(page) as window:
            await say(window, "Hi")
            await window.wait_for_selector(".message.failed")
            assert "The engine has died." in await window.text_content(".message.failed")
            assert "Error: The engine has died." in await window.text_content("#announcer")
            assert await window.input_value("#prompt") == "Hi", "to be sent again"
            await window.click("#settings summary")
            await window.fill("#temperature", "-3")
            await say(window, "More")
            assert len(page.asked) == 1, "a value out of range is not sent"


async def test_a_key_is_asked_for() -> None:
    async with engine() as running:
        page = PageApp(running, key="sesame")
        async with opened(page) as window:
            await window.wait_for_selector("#key-form:not([hidden])")
            assert await window.evaluate("document.activeElement.id") == "key"
            await window.fill("#key", "wrong")
            await window.press("#key", "Enter")
            await window.wait_for_selector("#key-form:not([hidden])")
            await window.fill("#key", "sesame")
            await window.press("#key", "Enter")
            await window.wait_for_selector("#connection.live")
            await shows(window, "model", "tiny-model")
            assert not await window.is_visible("#key-form")


async def test_the_engine_is_shown_live() -> None:
    async with engine() as running:
        page = PageApp(running)
        async with opened(page) as window:
            await window.wait_for_selector("#connection.live")
            assert await window.is_visible("#requests-none")
            async with busy(running):
                await shows(window, "running", "6")
                await shows(window, "waiting", "3")
                await until(window, "document.querySelectorAll('#requests tr').length === 9")
                await until(window, "Number(document.getElementById('rate').textContent) > 0")
                await until(window, "Number(document.getElementById('blocks-shared').textContent) >= 7")
                counts = "[...document.querySelectorAll('#legend b')].map(each => Number(each.textContent))"
                assert sum(await window.evaluate(counts)) == 300
                assert await window.evaluate(COLOURS) >= 3, "the map is drawn"
                await window.click("#pause")
                await shows(window, "connection", "Paused")
                age = await window.text_content("#requests tr td:last-child")
                await asyncio.sleep(0.4)
                assert await window.text_content("#requests tr td:last-child") == age
                await window.click("#pause")
                await window.wait_for_selector("#connection.live")
            await shows(window, "running", "0")


async def test_the_connection_comes_back() -> None:
    async with engine() as running:
        page = PageApp(running)
        async with opened(page) as window:
            await window.wait_for_selector("#connection.live")
            await window.context.set_offline(True)
            await window.evaluate("document.getElementById('pause').click(); document.getElementById('pause').click()")
            await window.wait_for_selector("#connection.lost")
            await window.context.set_offline(False)
            await window.wait_for_selector("#connection.live")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2()


async def test_in_the_app_itself(tokenizer: Tokenizer) -> None:
    """The page's own requests are answered by the real service, key and all."""
    model = ShadowModel(latency=0.005, vocab_size=49152, tokenizer=tokenizer)
    running = AsyncEngine(model, num_blocks=300, max_num_seqs=6, max_model_len=1000)
    async with running, opened(create_aiohttp_app(running, api_keys=["sesame"])) as window:
        await window.fill("#key", "sesame")
        await window.press("#key", "Enter")
        await window.wait_for_selector("#connection.live")
        await window.click("#settings summary")
        await window.fill("#max_tokens", "40")
        await say(window, "Hi")
        await window.wait_for_selector(".message.assistant .hint")
        hint = await window.text_content(".message.assistant .hint")
        assert hint.startswith("40 tokens")
        assert "cut at max tokens" in hint
        assert await window.text_content(".message.assistant > .text")
        await window.fill("#max_tokens", "900")
        await say(window, "More")
        await window.wait_for_selector(".message.streaming")
        await shows(window, "running", "1")
        await window.click("#stop")
        await shows(window, "running", "0")
        await shows(window, "blocks-used", "0")
        await shows(window, "aborted", "1")
        await window.fill("#system", "word " * 2000)
        await say(window, "Too long")
        await window.wait_for_selector(".problem")
        assert "tokens" in await window.text_content(".problem")
        times = await window.text_content("#ttft")
        assert times.endswith(" ms"), "the service observes its requests"


COLOURS = """() => {
  const map = document.getElementById('blocks');
  const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
  return new Set(Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 4).join())).size;
}"""

# What is hard to read: text with too little contrast, WCAG 2.2, 1.4.3. Returns the offenders.
CONTRAST = """() => {
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return { rgb: m.slice(0, 3), a: m[3] ?? 1 }; };
  const light = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.a === 1) return c.rgb; } return [255, 255, 255]; };
  const bad = [];
  const look = (e, colour, what) => {
    const found = ratio(parse(colour).rgb, ground(e));
    if (found < 4.5) bad.push(`${what}: ${found.toFixed(2)}`);
  };
  for (const e of document.body.querySelectorAll('*')) {
    if (!e.checkVisibility()) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim() !== '');
    if (own) look(e, getComputedStyle(e).color, `${e.tagName} ${e.textContent.trim().slice(0, 30)}`);
    if (e.placeholder) look(e, getComputedStyle(e, '::placeholder').color, `placeholder of ${e.id}`);
  }
  const root = getComputedStyle(document.documentElement);
  const hex = name => root.getPropertyValue(name).match(/\\w\\w/g).map(x => parseInt(x, 16));
  for (const name of ['--used', '--shared', '--cached', '--edge', '--accent']) {
    const found = ratio(hex(name), hex('--surface'));
    if (found < 3) bad.push(`${name}: ${found.toFixed(2)}`);
  }
  return bad;
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_contrast(scheme: str) -> None:
    async with engine() as running:
        page = PageApp(running, reasoning=["Hm"], error="No.")
        async with opened(page, scheme=scheme) as window, busy(running):
            await window.wait_for_selector("#requests tr")
            await say(window, "Hi")
            await window.wait_for_selector(".message.failed")
            page.error = None
            await say(window, "Hi")
            await window.wait_for_selector(".message.assistant .hint")
            await window.click("#settings summary")
            assert await window.evaluate(CONTRAST) == []
            await window.evaluate("document.documentElement.style.setProperty('--muted', 'rgb(128, 128, 128)')")
            assert await window.evaluate(CONTRAST) != [], "too little contrast would be found"


async def test_everything_has_a_name_and_the_order_is_that_of_the_page() -> None:
    async with engine() as running, opened(PageApp(running)) as window:
        await window.wait_for_selector("#connection.live")
        await window.click("#settings summary")
        session = await window.context.new_cdp_session(window)
        nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
        named = {"button", "textbox", "spinbutton", "link", "img", "image", "region", "table", "DisclosureTriangle"}
        roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node]
        assert {role for role, _ in roles} >= {"button", "textbox", "spinbutton", "region", "table", "status"}
        assert [role for role, name in roles if role in named and not name.strip()] == []
        await window.evaluate("document.querySelector('.skip').focus()")
        focused = "document.activeElement.id || document.activeElement.textContent.trim()"
        seen = [await window.evaluate(focused)]
        for _ in range(40):
            await window.keyboard.press("Tab")
            seen.append(await window.evaluate(focused))
            if seen[-1] == "pause":
                break
        order = ["new-chat", "log", "prompt", "send", "system", "temperature", "top_p", "seed", "stop_strings", "pause"]
        assert [each for each in seen if each in order] == order


async def test_reduced_motion_and_narrow_windows() -> None:
    async with engine() as running:
        page = PageApp(running, pieces=["a" * 400, " word"] * 3, delay=0.05)
        async with opened(page, size=NARROW, reduced_motion="reduce") as window:
            await window.wait_for_selector("#connection.live")
            await say(window, "Hi")
            await window.wait_for_selector(".message.streaming")
            moving = "getComputedStyle(document.querySelector('.message.streaming > .text'), '::after').animationName"
            assert await window.evaluate(moving) == "none"
            await window.wait_for_selector(".message.assistant .hint")
            await window.click("#settings summary")
            assert await window.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"


async def test_screenshots(tmp_path: Path) -> None:
    text = (
        "The Danube rises in the Black Forest and ends in the Black Sea. The Rhine begins in the Alps and reaches the "
        "North Sea near Rotterdam. The Po flows from Monte Viso to the Adriatic."
    )
    async with engine() as running:
        page = PageApp(running, pieces=[f"{word} " for word in text.split()], reasoning=["Three rivers, then."])
        for scheme in SCHEMES:
            for name, size in (("wide", WIDE), ("narrow", NARROW)):
                async with opened(page, scheme=scheme, size=size) as window, busy(running):
                    await window.wait_for_selector("#requests tr")
                    await say(window, "Name three rivers and where they end.")
                    await window.wait_for_selector(".message.assistant .hint")
                    path = tmp_path / f"{scheme}-{name}.png"
                    await window.screenshot(path=path, full_page=True)
                    assert path.stat().st_size > 20_000
