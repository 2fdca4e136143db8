"""What a request did, in a message of bounded size."""

import time

import pytest

from shared.stages import Stages


def test_a_stage_is_told_with_its_times_once_it_has_ended() -> None:
    stages, before = Stages(), time.time_ns() // 1000

    queued = stages.begin("queue")
    assert not stages.told
    queued.end()
    with stages.stage("pull", 64):
        pass

    assert [(stage.name, stage.num_tokens) for stage in stages.told] == [("queue", 0), ("pull", 64)]
    times = [t for stage in stages.told for t in (stage.begin_unix_us, stage.end_unix_us)]
    assert before <= times[0] and times == sorted(times)


def test_what_is_raised_in_a_stage_leaves_it_untold() -> None:
    stages = Stages()

    with pytest.raises(ValueError), stages.stage("pull"):
        raise ValueError

    assert not stages.told


def test_a_prompt_of_a_million_tokens_has_sixty_four_stages() -> None:
    """The last chunks are told as one; what comes after them is told."""
    stages = Stages()
    for _ in range(1000):
        stages.begin("chunk").end(1024)
    stages.begin("first").end(1)

    assert len(stages.told) == 65
    assert sum(stage.num_tokens for stage in stages.told) == 1000 * 1024 + 1
    assert stages.told[-1].name == "first"
