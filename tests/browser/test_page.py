"""The page at `/` in a real browser, against a gateway with fake workers."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.gateway.door.keys import new_key
from shared import farspan_pb2 as pb
from shared.block_hash import token_ids
from tests.browser.conftest import Window, opened
from tests.services.gateway.stage import MODEL, Stage, eventually, staged

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
)
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"


def stages(*told: tuple[str, int, int, int]) -> tuple[pb.Stage, ...]:
    """Names, begins and ends in ms from now, tokens."""
    now_us = time.time_ns() // 1000
    return tuple(
        pb.Stage(
            name=name,
            begin_unix_us=now_us + begin_ms * 1000,
            end_unix_us=now_us + end_ms * 1000,
            num_tokens=num_tokens,
        )
        for name, begin_ms, end_ms, num_tokens in told
    )


async def text_of(part: "Locator") -> str:
    return await part.text_content() or ""


async def test_the_page_opens_ready_to_write(window: Window) -> None:
    """Model and workers are there, the cursor stands in the message box."""
    await window.part(".health[data-kind=good]").wait_for()

    assert await window.part("#model").input_value() == MODEL
    assert await text_of(window.part("#health-text")) == "1 prefill, 1 decode"
    assert await window.page.evaluate("document.activeElement.id") == "prompt"
    await window.picture("start")


async def test_text_appears_before_the_answer_ends(window: Window, stage: Stage) -> None:
    """And the cost after it, as the gateway counts it."""
    plan = stage.plan("The user greets.</think>One two three four", hold_at=9, cached_tokens=2)

    await window.say("Hello")
    await window.begun(".text")
    assert "four" not in await text_of(window.part(".text"))
    assert await window.part("#stop").is_visible()
    await window.picture("growing")
    stage.fleet.release()
    await window.ended()

    assert await text_of(window.part(".text")) == "One two three four"
    num_prompt_tokens = len(token_ids(stage.fleet.submits[0].token_ids))
    foot = await text_of(window.part(".foot"))
    assert f"prompt {num_prompt_tokens}" in foot
    assert "cached 2" in foot
    assert f"generated {len(plan.answer)}" in foot
    assert "reasoning " in foot


async def test_the_thought_stands_apart_and_folds(window: Window, stage: Stage) -> None:
    """Open while the model thinks, folded when it answers, and openable again."""
    stage.plan("The user asks for rain.</think>Dry.", hold_at=5)

    await window.say("Will it rain?")
    await window.begun(".thought-text")
    assert await window.part(".thought-text").is_visible()
    stage.fleet.release()
    await window.ended()

    assert await text_of(window.part(".text")) == "Dry."
    assert await text_of(window.part(".thought-text")) == "The user asks for rain."
    assert not await window.part(".thought-text").is_visible()
    await window.part(".thought summary").click()
    assert await window.part(".thought-text").is_visible()


async def test_a_tool_s_result_is_given_by_hand(window: Window, stage: Stage) -> None:
    """Offered as JSON, called by the model, answered by the person, used by the model."""
    stage.plan(f"I call it.</think>{CALL}")
    stage.plan("Now I know.</think>It rains in Paris.")
    await window.part("#tools").fill(TOOLS)
    assert await text_of(window.part("#tools-state")) == "Offered: get_weather"

    await window.say("What is the weather in Paris?")
    await window.part(".results textarea").fill("rain, 12 degrees")
    assert json.loads(await text_of(window.part(".call pre"))) == {"city": "Paris"}
    await window.picture("tool")
    await window.part(".results button").click()
    await window.ended()

    assert await text_of(window.part(".text").last) == "It rains in Paris."
    second = stage.fleet.submits[1]
    prompt = stage.tokenizer.encode("<tool_response>rain, 12 degrees</tool_response>")
    told = token_ids(second.token_ids)
    assert any(told[at : at + len(prompt)] == prompt for at in range(len(told)))


async def test_tools_that_are_no_tools_are_not_sent(window: Window, stage: Stage) -> None:
    """The form says what is wrong with them."""
    await window.part("#tools").fill('[{"name": "x"}]')
    await window.say("Hello")

    assert "Entry 1" in await text_of(window.part("#notice"))
    assert await window.part("#prompt").input_value() == "Hello"
    assert stage.fleet.submits == []


async def test_stop_frees_the_workers(window: Window, stage: Stage) -> None:
    """The gateway tells both; what had come stays."""
    stage.plan("x</think>One two three four", hold_at=6)

    await window.say("Hello")
    await window.begun(".text")
    await window.part("#stop").click()
    await window.ended()

    assert await eventually(lambda: len(stage.fleet.cancels) == 2) < 1
    assert {worker for worker, _ in stage.fleet.cancels} == {"p0", "d0"}
    assert "One" in await text_of(window.part(".text"))
    assert "stopped" in await text_of(window.part(".foot"))
    assert await window.page.evaluate("document.activeElement.id") == "prompt"


async def test_settings_go_with_the_request(window: Window, stage: Stage) -> None:
    """Those left empty are the checkpoint's own."""
    stage.plan("Dry.")
    await window.part("#temperature").fill("0")
    await window.part("#top_p").fill("0.5")
    await window.part("#max_tokens").fill("7")
    await window.part("#seed").fill("11")
    await window.part("#system").fill("Be brief.")
    await window.part("#thinking").uncheck()

    await window.say("Hello")
    await window.ended()

    submit = stage.fleet.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p) == (0, 0.5)
    assert (sampling.max_new_tokens, sampling.seed) == (7, 11)
    assert "Be brief." in stage.tokenizer.decode(token_ids(submit.token_ids), skips_special=True)
    assert not await window.part(".thought").is_visible()


async def test_markup_stays_text(window: Window, stage: Stage) -> None:
    """Whoever writes into a model's context must not run code in a person's browser."""
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    fenced = f"\n```{nasty}\n{nasty}\n```\n`{nasty}` **{nasty}**"
    stage.plan(f"{nasty}</think>{nasty}{fenced}")
    dialogs: list[str] = []
    window.page.on("dialog", lambda dialog: dialogs.append(dialog.message))

    await window.say(nasty)
    await window.ended()

    assert await text_of(window.part(".turn.user")) == nasty
    assert await text_of(window.part(".thought-text")) == nasty
    assert (await text_of(window.part(".text"))).count(nasty) == 4
    assert await window.part(".log img, .log script").count() == 0
    assert dialogs == []


async def test_a_refusal_is_told_in_words(window: Window, stage: Stage) -> None:
    """With when to try again, and a button for it."""
    stage.plan("x</think>Dry.")
    stage.fleet.place_failure = pb.Failure(
        kind=pb.FAILURE_KIND_OVERLOADED, message="the fleet is full", retry_after_ms=3000
    )
    await window.say("Hello")
    failure = window.part(".failure")
    await failure.wait_for()
    assert "the fleet is full" in await text_of(failure)
    assert "Try again in 3 s" in await text_of(failure)
    window.expect("429")

    stage.fleet.place_failure = None
    await failure.get_by_role("button").click()
    await window.ended()

    assert await text_of(window.part(".text")) == "Dry."
    assert await failure.count() == 0


async def test_a_failure_amid_an_answer_is_told(window: Window, stage: Stage) -> None:
    """What had come stays readable."""
    failure = pb.Failure(kind=pb.FAILURE_KIND_INTERNAL, message="a rank is on fire")
    stage.plan("x</think>One two three four", fail_at=6, failure=failure)

    await window.say("Hello")
    await window.part(".failure").wait_for()

    assert "a rank is on fire" in await text_of(window.part(".failure"))
    assert "One" in await text_of(window.part(".text"))


async def test_the_timeline_shows_each_stage(window: Window, stage: Stage) -> None:
    """Queue, chunks, pulls and decode, by worker; the mark is the first token."""
    plan = stage.plan("x</think>One two")
    plan.prefill_stages = stages(
        ("prefill.queue", 5, 20, 0),
        ("prefill.chunk", 20, 60, 512),
        ("prefill.chunk", 60, 90, 488),
        ("prefill.first_token", 90, 95, 1),
    )
    plan.decode_stages = stages(
        ("decode.queue", 60, 62, 0),
        ("handoff.pull", 62, 110, 1000),
        ("decode.generate", 110, 300, 5),
    )

    await window.say("Hello")
    await window.ended()
    await window.part(".foot button").click()
    await window.part("#timeline .bar.decode").wait_for()

    rows = await window.part("#timeline li").all_inner_texts()
    shown = [" ".join(row.split("\n")) for row in rows]
    assert "queued 15 ms" in shown
    assert "prompt computed 70 ms · 1,000 tokens · 2 parts" in shown
    assert "KV pulled 48 ms · 1,000 tokens" in shown
    assert "generated 190 ms · 5 tokens" in shown
    assert await window.part("#timeline h3").all_inner_texts() == ["gateway", "p0", "d0"]
    assert await window.part("#timeline .bar.prefill").count() == 3
    assert await window.part("#timeline .mark").count() == len(rows)
    await window.picture("timeline")


async def test_the_fleet_is_followed(window: Window, stage: Stage) -> None:
    """Pools and load as the last heartbeats tell them, and who has come."""
    await window.part("#tab-fleet").click()
    await window.part("#fleet .worker").nth(1).wait_for()

    stage.fleet.workers["d0"].load = pb.Load(
        num_running=3,
        num_waiting=1,
        free_blocks=24,
        total_blocks=1024,
        free_device_pages=5,
        total_device_pages=10,
        free_index_pages=7,
        total_index_pages=8,
        tokens_per_s=321.4,
    )
    await stage.fleet.add(pb.ROLE_DECODE, "d1")
    await window.part("#fleet .worker").nth(2).wait_for()

    card = await window.part("#fleet [aria-label='Worker d0']").inner_text()
    assert "321 tokens/s" in card
    assert "1,000 of 1,024 used" in card
    assert "5 of 10 used" in card
    meter = window.part("#fleet [aria-label='Worker d0'] [role=meter]").first
    assert await meter.get_attribute("aria-valuenow") == "1000"
    await window.picture("fleet")


async def test_a_new_chat_forgets_the_old_one(window: Window, stage: Stage) -> None:
    """Also while an answer runs, which ends with it."""
    stage.plan("x</think>One two three four", hold_at=6)
    await window.say("Hello")
    await window.begun(".text")

    await window.part("#new-chat").click()
    await eventually(lambda: len(stage.fleet.cancels) == 2)
    stage.fleet.release()
    await window.say("Again")
    await window.ended()

    assert await window.part(".turn.user").all_inner_texts() == ["Again"]
    assert await window.part(".turn.assistant").count() == 1


async def test_everything_is_reached_by_keyboard(window: Window) -> None:
    """Tabs turn with the arrows, and every control has a name."""
    await window.part("#tab-settings").focus()
    for name in ("timeline", "fleet", "settings"):
        await window.page.keyboard.press("ArrowRight")
        assert await window.page.evaluate("document.activeElement.id") == f"tab-{name}"
        assert await window.part(f"#{name}").is_visible()

    unnamed = await window.page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, [role=meter]")]
        .filter((node) => !(node.labels?.length || node.ariaLabel || node.textContent.trim()))
        .map((node) => node.outerHTML)"""
    )
    assert unnamed == []


async def test_a_key_opens_the_page_and_all_it_asks_for(
    browser: "Browser", nats_url: str, tmp_path: Path
) -> None:
    """The browser asks for a name and the key once; the page never sees it."""
    key, entry = new_key("person", "tenant")
    (tmp_path / "keys.toml").write_text(entry)
    (tmp_path / "keys.toml").chmod(0o600)
    async with staged(nats_url, api_keys_file=tmp_path / "keys.toml") as stage:
        assert (await stage.http.get("/")).status_code == 401
        stage.plan("x</think>Dry.")
        credentials = {"username": "person", "password": key}
        async with opened(browser, stage.url, http_credentials=credentials) as window:
            await window.part(".health[data-kind=good]").wait_for()
            await window.say("Hello")
            await window.ended()
            await window.part(".foot button").click()
            await window.part("#timeline .mark").first.wait_for()

            assert await text_of(window.part(".text")) == "Dry."
            window.complaints = [each for each in window.complaints if "401" not in each]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_narrow_window_in_light_and_dark(
    window: Window, stage: Stage, scheme: str
) -> None:
    """At 400 px nothing is cut off."""
    await window.page.emulate_media(color_scheme=scheme)
    await window.page.set_viewport_size({"width": 400, "height": 800})
    long_word = "w" * 300
    stage.plan(f"{long_word}</think>{long_word}\n```\n{long_word}\n```\nend")
    await window.say(long_word)
    await window.ended()
    await window.picture(f"narrow-{scheme}")
    pages = [await window.page.evaluate("document.documentElement.scrollWidth")]
    await window.part("#panel-button").click()
    for name in ("settings", "timeline", "fleet"):
        await window.part(f"#tab-{name}").click()
        await window.picture(f"narrow-{scheme}-{name}")
        pages.append(await window.page.evaluate("document.documentElement.scrollWidth"))

    assert pages == [400] * 4
    await window.part("#panel-button").click()
    log = await window.page.evaluate(
        "[...document.querySelectorAll('.log, .turn, .text')]"
        ".filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.className)"
    )
    assert log == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_in_light_and_dark(window: Window, stage: Stage, scheme: str) -> None:
    """By the 4.5 that WCAG 2 wants (AA), in every panel, errors and calls included."""
    await window.page.emulate_media(color_scheme=scheme)
    stage.plan(f"I call it.</think>`code` **bold**{CALL}")
    await window.part("#tools").fill(TOOLS)
    await window.say("Hello")
    await window.part(".results").wait_for()
    stage.fleet.place_failure = pb.Failure(kind=pb.FAILURE_KIND_OVERLOADED, message="full")
    await window.say("Again")
    await window.part(".failure").wait_for()
    window.expect("429")

    for name in ("settings", "timeline", "fleet"):
        await window.part(f"#tab-{name}").click()
        pairs = await window.page.evaluate(COLORS)
        assert len(pairs) > 20
        assert [each for each in pairs if contrast(each[1], each[2]) < 4.5] == []
        _, color, back = pairs[0]
        assert (luminance(back) < luminance(color)) == (scheme == "dark")


# [text, its colour, the colour behind it] of each visible text; colours as the screen shows them.
COLORS = """
() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colors) => {
    for (const color of colors) { pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const backs = (node) =>
    node ? [...backs(node.parentElement), getComputedStyle(node).backgroundColor] : ["white"];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const isSeen = node.checkVisibility() && node.getBoundingClientRect().width > 1;
    if (!texts.currentNode.data.trim() || !isSeen || node.closest(".hidden, .skip")) continue;
    const behind = backs(node);
    const color = getComputedStyle(node).color;
    found.push([texts.currentNode.data.trim(), paint([...behind, color]), paint(behind)]);
  }
  return found;
}
"""


def luminance(color: Sequence[int]) -> float:
    """WCAG's relative luminance of 8-bit sRGB, 0 to 1."""
    parts = [part / 255 for part in color]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """WCAG's contrast of two colours, 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
