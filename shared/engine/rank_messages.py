"""What a worker's coordinator and its rank processes tell each other, over pipes, as pickles."""

from dataclasses import dataclass
from pathlib import Path

from shared.engine.step import StepResult


@dataclass(frozen=True)
class RankSettings:
    """What all ranks of one worker have in common."""

    owner: str  # the worker's id
    epoch: int
    checkpoint: Path
    kv_format: str
    num_ranks: int
    interleave: int
    num_blocks: int  # of each rank's pool
    num_threads: int  # of each rank, if it computes on the CPU
    device: str = "cpu"  # or cuda:N, the first rank's; the next ones' follow it


@dataclass(frozen=True)
class RankReady:
    """A rank's first message: it has its weights and serves its pools."""

    regions: bytes  # pb.RankRegions
    layout: bytes  # pb.KvLayout


@dataclass(frozen=True)
class RankRefused:
    """A rank's first and last message: a setting or a file is wrong."""

    reason: str


@dataclass(frozen=True)
class RankReply:
    """The answer to a step. All ranks' digests are equal; one rank's result is enough."""

    digest: bytes  # of the step and of the tokens drawn
    result: StepResult | None  # rank 0's
