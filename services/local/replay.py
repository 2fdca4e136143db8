"""farspan replay-decisions: stored placement decisions, decided again from their inputs.

Reads what routers write (ROUTER_DECISIONS_FILE) and what the gateway shows (/debug/decisions):
JSON, one object a line. The choice and every score must be the same bit for bit; what neither
depends on (times, names, the prompt's digest) is not compared.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from services.router import records
from shared import farspan_pb2 as pb
from shared.errors import ConfigError
from shared.lifecycle import EXIT_FAILED


def replay_decisions(file: Path) -> int:
    """Decide again; 0 if all went as before, 1 with the first difference. Raises ConfigError."""
    num_decisions = 0
    for line_number, record in _records(file):
        num_decisions += 1
        try:
            replayed = records.replay(record)
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(
                f"{file}:{line_number} is not a decision: its figures cannot be ({error})"
            ) from error
        difference = records.first_difference(record.outcome, replayed)
        if difference:
            request_id = record.inputs.request.request_id
            sys.stderr.write(
                f"farspan: {file}:{line_number}: request {request_id} is decided otherwise now\n"
                f"  {difference}\n"
                f"  stored:   {_words(record.outcome)}\n"
                f"  replayed: {_words(replayed)}\n"
            )
            return EXIT_FAILED
    if not num_decisions:
        raise ConfigError(f"{file} holds no decision")
    print(f"{num_decisions} decisions, all the same")
    return 0


def _records(file: Path) -> Iterator[tuple[int, pb.DecisionRecord]]:
    """Every decision with the number of its line."""
    number = 0
    try:
        with file.open() as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    for fields in _decisions(json.loads(line)):
                        yield number, json_format.ParseDict(fields, pb.DecisionRecord())
    except OSError as error:
        raise ConfigError(f"cannot read decisions from {file}: {error}") from error
    except (ValueError, RecursionError, json_format.ParseError) as error:
        raise ConfigError(f"{file}:{number} is not a decision: {error}") from error


def _decisions(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    several = found.get("decisions", [found])
    if not isinstance(several, list) or not all(isinstance(each, dict) for each in several):
        raise ValueError("its decisions are no list of JSON objects")
    return several


def _words(outcome: pb.DecisionOutcome) -> str:
    if outcome.HasField("failure"):
        return f"{pb.FailureKind.Name(outcome.failure.kind)}: {outcome.failure.message}"
    return outcome.placement.reason
