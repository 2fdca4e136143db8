"""The page in front of a real stack: the bundled checkpoint answers, and every stage is shown."""

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from services.local.plan import Options
from services.local.stack import Stack
from tests.browser.conftest import opened

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_PATIENCE_MS = 120_000  # a first request of a busy machine


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """What `make serve` runs, on free ports."""
    options = Options(port=0, run_folder=tmp_path_factory.mktemp("stack"))
    async with Stack(options, _report) as running:
        yield running


async def test_a_question_is_answered_and_its_time_explained(
    browser: "Browser", stack: Stack
) -> None:
    """From the message box to the workers and back, with what each did; a tool is called, too."""
    async with opened(browser, stack.base_url.removesuffix("v1")) as window:
        window.page.set_default_timeout(_PATIENCE_MS)
        await window.part("#temperature").fill("0")

        await window.say("What does river mean?")
        await window.begun(".text")
        await window.ended()
        await window.part(".foot button").click()
        await window.part("#timeline .bar.decode").first.wait_for()
        await window.picture("served")

        assert "stream of water" in (await window.part(".text").text_content() or "")
        names = await window.part("#timeline .name").all_inner_texts()
        assert {"prompt computed", "KV pulled", "generated"} <= set(names)
        await window.part("#tab-fleet").click()
        meters = window.part("#fleet [role=meter]")
        await meters.nth(3).wait_for()  # prefill's blocks; decode's host, device and index pages
        await window.picture("served-fleet")

        await window.part("#new-chat").click()
        await window.part("#suggestions button").last.click()
        await window.part(".results textarea").fill('{"temperature": 17, "sky": "rain"}')
        assert "Paris" in (await window.part(".call pre").text_content() or "")
        await window.part(".results button").click()
        await window.ended()

        assert "rain, 17 degrees" in (await window.part(".text").last.text_content() or "")
        await window.picture("served-tool")
