"""Random samplings with everything that may be asked, for both samplers' tests."""

import numpy as np
from hypothesis import strategies as st

from shared.engine.step import Sampling, Shaping

VOCABULARY = 50
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=20, unique=True)


def bits(token_ids: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    chosen = np.zeros(VOCABULARY, np.bool_)
    chosen[token_ids] = True
    return np.packbits(chosen, bitorder="little")


@st.composite
def shapings(draw: st.DrawFn) -> Shaping:
    added = draw(ids)
    repeats, adds, allows = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    quarters = st.integers(-40, 40).map(lambda number: number / 4)
    additions = draw(st.lists(quarters, min_size=len(added), max_size=len(added)))
    return Shaping(
        repetition_penalty=draw(st.sampled_from([0.5, 1.3, 2.0])) if repeats else 1.0,
        seen=bits(draw(ids)) if repeats else None,
        added_token_ids=np.array(added, np.int64) if adds else None,
        additions=np.array(additions, np.float32) if adds else None,
        allowed=bits([*draw(ids), 0]) if allows else None,
    )


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
        top_p=st.sampled_from([0.01, 0.513, 0.957, 1.0]),
        top_k=st.sampled_from([0, 1, 7, VOCABULARY, 200]),
        seed=st.integers(0, 2**64 - 1),
        index=st.integers(0, 1000),
        banned_token_ids=st.lists(
            st.integers(1, VOCABULARY - 1), max_size=VOCABULARY - 1, unique=True
        ).map(tuple),
        min_p=st.sampled_from([0.0, 0.03, 0.4]),
        shaping=st.none() | shapings(),
        num_logprobs=st.none() | st.integers(0, 20),
    )
