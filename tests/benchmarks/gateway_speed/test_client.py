import pytest

from benchmarks.gateway_speed.client import Client, Load
from benchmarks.gateway_speed.flow import Flow
from benchmarks.gateway_speed.mock_server import MockServer

BODY = '{"max_tokens": 20, "messages": ["bench-{number}"]}'


def test_the_client_hears_every_token_of_every_stream_when_it_was_sent() -> None:
    """Counted and timed by searching bytes, wherever the network cuts them."""
    flow = Flow()
    with Client(flow) as client, MockServer([" buz", " zoo"], flow) as server:
        heard = client.load(Load(server.port, [BODY], num_streams=3, rounds=2, first_number=5))
        sent = server.sent_s()
        with pytest.raises(RuntimeError, match="Connect call failed"):
            client.load(Load(1, [BODY]))

    assert sorted(answer.number for answer in heard) == [5, 6, 7, 8, 9, 10]
    for answer in heard:
        sent_s = sent[f"bench-{answer.number}"]
        assert len(answer.arrived_s) == len(sent_s) == answer.num_token_events == 20
        assert all(a >= b for a, b in zip(answer.arrived_s, sent_s, strict=True))
