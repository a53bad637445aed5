"""``slipstream generate``: one prompt to a running gateway, its answer streamed, and what the optimisation did."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import click
import grpc
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from slipstream.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

MODES = {"auto": common_pb2.MODE_AUTO, "standard": common_pb2.MODE_STANDARD, "speculative": common_pb2.MODE_SPECULATIVE}
VERIFICATIONS = {
    "token": common_pb2.VERIFICATION_TOKEN,
    "block": common_pb2.VERIFICATION_BLOCK,
    "coupled": common_pb2.VERIFICATION_COUPLED,
}
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


@click.command("generate")
@click.argument("prompt")
@click.option("--max-tokens", type=int, help="Tokens to generate at most.")
@click.option("--temperature", type=float, help="0 is greedy (the default).")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--min-p", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--seed", type=int)
@click.option("--verification", type=click.Choice(list(VERIFICATIONS)), help="How sampled guesses are accepted.")
@click.option("--stop", multiple=True, help="End before this string; may be given several times.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without chat template.")
@click.option("--mode", type=click.Choice(list(MODES)), default="auto", show_default=True)
@click.option("--timeout", type=float, help="Deadline in seconds.")
@click.option("--address", envvar="SLIPSTREAM_ADDRESS", default="127.0.0.1:50050", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
def command(prompt: str, address: str, as_json: bool, timeout: float | None, **options: Any) -> None:
    """Stream an answer to PROMPT ("-" reads it from standard input). Text goes to standard output, the tag's summary
    to standard error.

    Exit codes: 0 answered, 2 bad input, 1 anything else that failed, 130 interrupted.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        request = build_request(text, **options)
        answer = stream(request, address, timeout, show=not as_json)
    except (ValueError, OverflowError, TypeError) as error:
        _exit(f"bad value: {error}", BAD_INPUT)
    except grpc.RpcError as error:
        _exit(explain(error, address), BAD_INPUT if error.code() is grpc.StatusCode.INVALID_ARGUMENT else FAILED)
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
    else:
        click.echo()
        click.echo(summary(answer), err=True)


def build_request(
    text: str,
    mode: str = "auto",
    raw: bool = False,
    system: str | None = None,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    verification: str | None = None,
    **sampling: Any,
) -> gateway_pb2.GatewayServiceGenerateRequest:
    """The request that the options describe; options that are None are left to the server."""
    if raw:
        prompt = common_pb2.Prompt(text=text)
    else:
        turns = [common_pb2.ChatMessage(role="system", content=system)] if system is not None else []
        turns.append(common_pb2.ChatMessage(role="user", content=text))
        prompt = common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=turns))
    given = {name: value for name, value in sampling.items() if value is not None}
    if verification is not None:
        given["verification"] = VERIFICATIONS[verification]
    return gateway_pb2.GatewayServiceGenerateRequest(
        prompt=prompt,
        mode=MODES[mode],
        sampling=common_pb2.SamplingParams(**given),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, stop=stop),
    )


def stream(
    request: gateway_pb2.GatewayServiceGenerateRequest, address: str, timeout: float | None = None, show: bool = True
) -> dict[str, Any]:
    """Send a request; ``show`` prints the text as it comes. Returns what ``--json`` prints. Raises grpc.RpcError."""
    answer: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "", "usage": {}, "tag": {}}
    with grpc.insecure_channel(address) as channel:
        call: Any = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=timeout)
        try:
            for message in call:
                match message.WhichOneof("message"):
                    case "chunk":
                        answer["text"] += message.chunk.text
                        answer["token_ids"].extend(message.chunk.token_ids)
                        if show:
                            click.echo(message.chunk.text, nl=False)
                    case "finished":
                        finished = message.finished
                        answer["finish_reason"] = word(common_pb2.FinishReason.DESCRIPTOR, finished.finish_reason)
                        answer["usage"] = as_dict(finished.usage)
                        answer["tag"] = as_dict(finished.tag)
        finally:
            call.cancel()
    return answer


def as_dict(message: Message) -> dict[str, Any]:
    """A message with all its fields, set or not: snake case, enums as short lower-case words, numbers as numbers."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:
    """The value of a field; ``field`` is its descriptor, of either of protobuf's two kinds."""
    return [_single(field, item) for item in value] if field.is_repeated else _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_dict(value)
    return value if field.enum_type is None else word(field.enum_type, value)


def word(enum: EnumDescriptor, number: int) -> str:
    """MODE_SPECULATIVE is "speculative"; a value that this client does not know is its number."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower()


def summary(answer: dict[str, Any]) -> str:
    """The tag in a few lines."""
    usage, tag = answer["usage"], answer["tag"]
    time, origin = tag["time"], tag["tokens_by_origin"]
    asked = tag["requested_mode"]
    reason = f" (asked for {asked}: {tag['mode_reason']})" if tag["mode_reason"] else ""
    lines = [
        f"--- {tag['active_mode']}{reason}, {tag['quality_class']}; finish reason: {answer['finish_reason']}",
        f"    {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} completion tokens"
        f" in {tag['target_passes']} target passes ({tag['target_passes_saved']} saved)",
    ]
    if tag["num_spec_steps"]:
        lines.append(
            f"    {tag['num_spec_steps']} rounds: {tag['num_accepted_draft_tokens']} of {tag['num_draft_tokens']}"
            f" guesses accepted ({tag['draft_acceptance_rate']:.0%}),"
            f" {tag['mean_acceptance_length']:.2f} tokens a round, by accepted {tag['acceptance_histogram']}"
        )
    lines.append("    tokens by origin: " + ", ".join(f"{name} {count}" for name, count in origin.items() if count))
    lines.append("    ms: " + ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in time.items()))
    if tag["fallbacks"]:
        lines.append("    fallbacks: " + ", ".join(f"{f['reason']} {f['rounds']}" for f in tag["fallbacks"]))
    return "\n".join(lines)


def explain(error: Any, address: str) -> str:
    """A failed call in words, with what to try where that is known."""
    told = f"{error.code().name}: {error.details()}"
    refused = error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or "")
    return f"no gateway answers at {address}; is `slipstream serve` running?" if refused else told


def _exit(message: str, code: int) -> NoReturn:
    click.echo(f"slipstream: {message}", err=True)
    raise SystemExit(code)
