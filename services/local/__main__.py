"""The command line `farspan`: serve, status, chat, new-key, replay-decisions."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.local.chat import chat
from services.local.new_key import print_new_key
from services.local.plan import Options
from services.local.replay import replay_decisions
from services.local.serve import serve
from services.local.stack import StackFailed
from services.local.status import status
from shared.device_name import cuda_ordinal
from shared.errors import ConfigError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILED, run

DEFAULTS = Options()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all went well, 1 if it failed, 2 if something is missing or wrong."""
    try:
        given = _parser().parse_args(arguments)
        code: int = given.run(given)
    except StackFailed as error:
        sys.stderr.write(f"farspan: {error}\n")
        return EXIT_FAILED
    except ConfigError as error:
        sys.stderr.write(f"farspan: {error}\n")
        return EXIT_CONFIG
    return code


def _serve(given: argparse.Namespace) -> int:
    options = Options(
        port=given.port,
        checkpoint=given.checkpoint,
        prefill_workers=given.prefill_workers,
        decode_workers=given.decode_workers,
        prefill_ranks=given.prefill_ranks,
        interleave=given.interleave,
        kv_format=given.kv_format,
        prefill_device=given.prefill_device,
        decode_device=given.decode_device,
        trace_file=given.trace_file,
    )
    return run("farspan", lambda stopping: serve(options, stopping))


def _status(given: argparse.Namespace) -> int:
    return status(given.port)


def _chat(given: argparse.Namespace) -> int:
    url = given.url or f"http://127.0.0.1:{given.port}/v1"
    return chat(url, given.max_tokens, os.environ.get("FARSPAN_API_KEY", ""))


def _new_key(given: argparse.Namespace) -> int:
    return print_new_key(given.name, given.tenant)


def _replay(given: argparse.Namespace) -> int:
    return replay_decisions(given.file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="farspan", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("serve", help="start everything on this machine")
    command.set_defaults(run=_serve)
    _add_port(command)
    command.add_argument("--checkpoint", type=Path, default=DEFAULTS.checkpoint, metavar="DIR")
    command.add_argument("--prefill-workers", type=_positive, default=DEFAULTS.prefill_workers)
    command.add_argument("--decode-workers", type=_positive, default=DEFAULTS.decode_workers)
    command.add_argument("--prefill-ranks", type=_positive, default=DEFAULTS.prefill_ranks)
    command.add_argument("--interleave", type=int, choices=(1, 64), default=DEFAULTS.interleave)
    command.add_argument("--kv-format", choices=("fp32", "fp8_ds_mla"), default=DEFAULTS.kv_format)
    for role, others in (("prefill", "more ranks and workers"), ("decode", "more workers")):
        command.add_argument(
            f"--{role}-device",
            type=_device,
            default="cpu",
            metavar="DEVICE",
            help=f"cpu, or cuda:N for the first; {others} take the devices after it",
        )
    command.add_argument(
        "--trace-file", type=Path, help="default: traces.jsonl beside the logs", metavar="FILE"
    )

    command = commands.add_parser("status", help="show services, workers and pools")
    command.set_defaults(run=_status)
    _add_port(command)

    command = commands.add_parser("chat", help="talk in this terminal; the key is FARSPAN_API_KEY")
    command.set_defaults(run=_chat)
    _add_port(command)
    command.add_argument("--url", help="an OpenAI-compatible base URL, instead of --port")
    command.add_argument("--max-tokens", type=_positive, default=1024)

    command = commands.add_parser("new-key", help="make an API key and its entry for the file")
    command.set_defaults(run=_new_key)
    command.add_argument("name", help="who bears it: it stands in logs, never the key")
    command.add_argument("--tenant", default="default", help="whose cached prompts it shares")

    command = commands.add_parser("replay-decisions", help="check that placements replay")
    command.set_defaults(run=_replay)
    command.add_argument("file", type=Path, help="JSON lines from a router or the gateway")
    return parser


def _add_port(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--port",
        type=int,
        default=os.environ.get("GATEWAY_PORT", str(DEFAULTS.port)),
        help="the gateway's port on 127.0.0.1 (GATEWAY_PORT, else %(default)s)",
    )


def _device(text: str) -> str:
    try:
        cuda_ordinal(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
