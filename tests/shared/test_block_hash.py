import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.block_hash import (
    BLOCK_TOKENS,
    block_hashes,
    namespace,
    pack,
    token_bytes,
    token_ids,
    unpack,
)

NAMESPACE = namespace("demo", "r1")
ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_golden_vectors() -> None:
    """Redis and other machines hold these values: a change here orphans every stored block."""
    prompt = list(range(3 * BLOCK_TOKENS + 5))

    assert NAMESPACE.hex() == "9138ed0157904bc4ec30ddfb23922ef5"
    assert namespace("demo", "r1", "tenant", "lora").hex() == "8301639572535771698f01c7e3b763c3"
    assert [value.hex() for value in block_hashes(NAMESPACE, prompt)] == [
        "d462dd9d308d0eec8de576ea66d21a31",
        "5a1e1494f68b407b852ff96d69b43dcc",
        "d117621410c0b8d0e0312af1cd73bcd6",
    ]


def test_hashes_are_equal_in_every_process() -> None:
    """A per-process seed would be useless between services."""
    code = (
        "from shared.block_hash import *;"
        "print(pack(block_hashes(namespace('demo', 'r1'), list(range(128)))).hex())"
    )

    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout

    assert output.decode().strip() == pack(block_hashes(NAMESPACE, list(range(128)))).hex()


@given(ids)
def test_one_hash_for_each_full_block(prompt: list[int]) -> None:
    hashes = block_hashes(NAMESPACE, prompt)

    assert len(hashes) == len(prompt) // BLOCK_TOKENS
    assert all(len(value) == 16 for value in hashes)


@given(ids, ids)
def test_a_common_prefix_has_common_hashes_and_nothing_else_has(a: list[int], b: list[int]) -> None:
    """The longest prefix of hashes is the longest prefix of whole blocks."""
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1

    pairs = zip(block_hashes(NAMESPACE, a), block_hashes(NAMESPACE, b), strict=False)
    equal = [first == second for first, second in pairs]

    assert sum(equal) == common // BLOCK_TOKENS
    assert equal == sorted(equal, reverse=True)


@pytest.mark.parametrize(
    "other",
    [
        ("demo2", "r1", "", ""),
        ("demo", "r2", "", ""),
        ("demo", "r1", "salt", ""),
        ("demo", "r1", "", "salt"),
        ("demor", "1", "", ""),
    ],
)
def test_namespaces_never_share(other: tuple[str, str, str, str]) -> None:
    """Tenants with different salts must not see each other's blocks, not even by concatenation."""
    prompt = [1] * BLOCK_TOKENS

    assert block_hashes(namespace(*other), prompt) != block_hashes(NAMESPACE, prompt)


@given(ids)
def test_token_ids_survive_the_wire(prompt: list[int]) -> None:
    assert token_ids(token_bytes(prompt)) == prompt
    assert block_hashes(NAMESPACE, token_bytes(prompt)) == block_hashes(NAMESPACE, prompt)


def test_the_wire_form_is_little_endian_uint32() -> None:
    assert token_bytes([1, 2**32 - 1]) == bytes([1, 0, 0, 0, 255, 255, 255, 255])


@given(ids)
def test_hashes_survive_the_wire(prompt: list[int]) -> None:
    hashes = block_hashes(NAMESPACE, prompt)

    assert unpack(pack(hashes)) == hashes


def test_torn_wire_forms_are_refused() -> None:
    """A cut message must not become a shorter prompt."""
    with pytest.raises(ValueError, match="multiple of 4"):
        token_ids(b"12345")
    with pytest.raises(ValueError, match="multiple of 4"):
        block_hashes(NAMESPACE, b"12345")
    with pytest.raises(ValueError, match="multiple of 16"):
        unpack(b"12345")


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_outside_uint32_are_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token_id])
