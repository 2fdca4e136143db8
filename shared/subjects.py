"""Every NATS subject there is: what travels on it, who sends, who receives.

A subject with a reply type is a request; one without is a plain message. `{worker}` and `{gateway}`
are ids made of [A-Za-z0-9_-]. No subject string exists anywhere else.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from shared import farspan_pb2 as pb

MessageT = TypeVar("MessageT", bound=ProtoMessage)
ReplyT = TypeVar("ReplyT", bound=ProtoMessage)


@dataclass(frozen=True)
class Subject(Generic[MessageT]):
    """A plain message's subject; delivery is at most once."""

    template: str
    message_type: type[MessageT]

    def name(self, **ids: str) -> str:
        """The subject for the given worker or gateway id."""
        return self.template.format(**ids)


@dataclass(frozen=True)
class RequestSubject(Generic[MessageT, ReplyT]):
    """A request's subject; exactly one receiver answers, or the sender learns that none did."""

    template: str
    message_type: type[MessageT]
    reply_type: type[ReplyT]

    def name(self, **ids: str) -> str:
        """The subject for the given worker or gateway id."""
        return self.template.format(**ids)


# gateway -> router (queue group: any router answers)
PLACE = RequestSubject("farspan.v1.router.place", pb.PlaceRequest, pb.PlaceReply)
# gateway -> every router
PLACEMENT_ENDED = Subject("farspan.v1.router.ended", pb.PlacementEnded)
GATEWAY_ALIVE = Subject("farspan.v1.router.alive", pb.GatewayAlive)
# gateway -> every router; those that remember the request reply
DECISION_QUERY = Subject("farspan.v1.router.decision", pb.DecisionQuery)
DECISION_REPLY = Subject("farspan.v1.gateway.{gateway}.decision", pb.DecisionReply)

# gateway -> prefill
SUBMIT = RequestSubject("farspan.v1.prefill.{worker}.submit", pb.Submit, pb.SubmitReply)
# gateway -> prefill and decode, whatever the state; unknown ids are ignored
CANCEL = Subject("farspan.v1.worker.{worker}.cancel", pb.Cancel)
# gateway -> the worker that sent the tokens
RESEND_TOKENS = Subject("farspan.v1.worker.{worker}.resend", pb.ResendTokens)

# prefill -> decode
OFFER = RequestSubject("farspan.v1.decode.{worker}.offer", pb.HandoffOffer, pb.HandoffReply)
CHUNK_READY = Subject("farspan.v1.decode.{worker}.chunk", pb.ChunkReady)
PREFILL_DONE = RequestSubject("farspan.v1.decode.{worker}.done", pb.PrefillDone, pb.Accepted)
# decode -> prefill
RELEASE = Subject("farspan.v1.prefill.{worker}.release", pb.Release)
LEASE_RENEWAL = Subject("farspan.v1.prefill.{worker}.lease", pb.LeaseRenewal)
# either -> the other
ABORT = Subject("farspan.v1.worker.{worker}.abort", pb.Abort)

# prefill, decode -> gateway: plain for tokens, a request for the message that carries End
TOKENS = Subject("farspan.v1.gateway.{gateway}.batch", pb.TokenBatch)
TOKENS_END = RequestSubject("farspan.v1.gateway.{gateway}.end", pb.Tokens, pb.TokensReply)

# prefill, decode -> router, gateway, command line
HEARTBEAT = Subject("farspan.v1.fleet.heartbeat", pb.Heartbeat)
# prefill, decode -> kv_index
BLOCK_EVENTS = Subject("farspan.v1.kv.events", pb.BlockEvents)
# kv_index -> prefill, decode
REPLAY = RequestSubject("farspan.v1.worker.{worker}.replay", pb.ReplayRequest, pb.ReplayReply)
