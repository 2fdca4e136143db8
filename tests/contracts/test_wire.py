"""The wire contract: what is checked in is what the proto file says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared import farspan_pb2 as pb
from shared import subjects

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    """An edited proto file without `make proto` would be a contract on paper only."""
    (tmp_path / "shared").mkdir()
    subprocess.run(
        [
            sys.executable,
            *("-m", "grpc_tools.protoc", f"-Ishared={ROOT / 'proto'}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "shared/farspan.proto"),
        ],
        check=True,
        cwd=ROOT,
    )

    for name in ("farspan_pb2.py", "farspan_pb2.pyi"):
        assert (tmp_path / "shared" / name).read_text() == (ROOT / "shared" / name).read_text()


@pytest.mark.parametrize("enum", pb.DESCRIPTOR.enum_types_by_name.values(), ids=lambda e: e.name)
def test_zero_means_unspecified_in_every_enum(enum: object) -> None:
    """A field nobody set must not read as a decision."""
    values = enum.values_by_number  # type: ignore[attr-defined]

    assert values[0].name.endswith("_UNSPECIFIED")


def all_subjects() -> list[subjects.Subject | subjects.RequestSubject]:
    kinds = (subjects.Subject, subjects.RequestSubject)
    return [value for value in vars(subjects).values() if isinstance(value, kinds)]


def test_no_two_subjects_share_a_name() -> None:
    templates = [subject.template for subject in all_subjects()]

    assert len(templates) == len(set(templates)) > 10


def test_subjects_are_plain_versioned_words() -> None:
    """NATS ADR-6: ASCII words, no wildcards; the version leads, so two can live side by side."""
    word = r"[a-z0-9_]+|\{worker\}|\{gateway\}"

    for subject in all_subjects():
        assert re.fullmatch(rf"farspan\.v1(\.({word}))+", subject.template)


def test_a_prompt_of_a_million_tokens_fits_a_message() -> None:
    """compose/nats.conf allows 64 MB; token ids as bytes keep the largest message far below."""
    offer = pb.HandoffOffer(
        token_ids=bytes(4 << 20),
        block_hashes=bytes(16 << 14),
        blocks=[pb.BlockRef(block_id=i, generation=2**40) for i in range(1 << 14)],
    )

    assert offer.ByteSize() < 8 << 20
