"""A headless Chromium, and a window on the page that forgives nothing."""

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest_asyncio

from tests.services.gateway.stage import Stage, staged

if TYPE_CHECKING:  # installed by `make test-browser`, and not by `make test`, which loads this too
    from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Window:
    """The page in a browser, and what went wrong in it."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)  # errors on the console, policy included
    addresses: set[str] = field(default_factory=set)  # hosts and ports that were asked

    def watch(self) -> None:
        """Note what the page does from now on."""
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note_request)

    def part(self, selector: str) -> "Locator":
        """An element, visible or not."""
        return self.page.locator(selector)

    async def say(self, text: str) -> None:
        """Write a message and send it."""
        await self.part("#prompt").fill(text)
        await self.page.keyboard.press("Enter")

    async def begun(self, selector: str) -> None:
        """Wait until an element holds some text."""
        await self.part(selector).filter(has_text=re.compile("..")).wait_for(state="attached")

    async def ended(self) -> None:
        """Wait until the answer has ended."""
        await self.part("#send").wait_for(state="visible")

    async def picture(self, name: str) -> None:
        """Keep a picture, where somebody wants to look (BROWSER_PICTURES names a folder)."""
        if folder := os.environ.get("BROWSER_PICTURES"):
            await self.page.screenshot(path=Path(folder) / f"{name}.png")

    def expect(self, text: str) -> None:
        """Exactly one complaint, which the test has provoked."""
        (complaint,) = self.complaints
        assert text in complaint
        self.complaints.clear()

    def _note_message(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _note_request(self, request: "Request") -> None:
        self.addresses.add(urlsplit(request.url).netloc)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator["Browser"]:
    """Chromium with a fresh profile."""
    from playwright.async_api import async_playwright

    program = shutil.which("chromium")
    assert program, "Chromium is not installed; `make test-browser` installs it"
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        await running.close()


@pytest_asyncio.fixture(loop_scope="session")
async def stage(nats_url: str) -> AsyncIterator[Stage]:
    """A gateway with one pair of fake workers."""
    async with staged(nats_url) as running:
        yield running


@asynccontextmanager
async def opened(browser: "Browser", url: str, **settings: Any) -> AsyncIterator[Window]:
    """The page at a gateway's address, 1,280 wide, in a context of these settings. Whatever a test
    does, nothing may be complained of, and no other address asked.
    """
    context = await browser.new_context(viewport={"width": 1280, "height": 800}, **settings)
    context.set_default_timeout(10_000)
    window = Window(await context.new_page())
    window.watch()
    await window.page.goto(url)
    await window.part("#model option").wait_for(state="attached")
    yield window
    await context.close()
    assert window.complaints == []
    assert window.addresses == {urlsplit(url).netloc}


@pytest_asyncio.fixture(loop_scope="session")
async def window(browser: "Browser", stage: Stage) -> AsyncIterator[Window]:
    """The page of the fake workers' gateway."""
    async with opened(browser, stage.url) as running:
        yield running
