"""What differs between OpenAI-compatible servers, and how their answers are read. No connection."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preempt_harness.adapters import protocol
from preempt_harness.adapters.openai_server import ServerStartError
from preempt_harness.admission import AdmissionPolicy

_ID = "token_id:"  # how vLLM names tokens by their ids


@dataclass(frozen=True, kw_only=True)
class ServerPreset:
    """What is particular to one kind of server.

    Attributes:
        capabilities: beyond those of every server.
        policy: how it admits; "output_reserved" where it never preempts.
        body: fields of every request.
        num_forbidden: most tokens that may be likelier than the server's own choice because the
            request forbids them; so many more log probabilities are asked for.
        preemptions: names that the Prometheus counter of preemptions has had; empty for none.
        health_path: answers 200 when the server is ready.
    """

    capabilities: frozenset[str] = frozenset()
    policy: AdmissionPolicy = "output_reserved"
    body: Mapping[str, Any] = field(default_factory=dict)
    num_forbidden: int = 1  # the end of the sequence
    preemptions: tuple[str, ...] = ()
    health_path: str = "/health"


_PREEMPTS = frozenset(
    {
        protocol.RECOMPUTE,
        protocol.CHUNKED_PREFILL,
        protocol.MIXED_STEPS,
        protocol.STOP_TOKENS,
    }
)
# llama.cpp names tokens when a character is complete, and then only the last of them: all others
# are counted and never shown. Where ASCII alone may be chosen, no token is part of a character.
_WHOLE_CHARACTERS = r"root ::= [\x01-\x7F]*"
_END_OF_ASCII = 0x80

PRESETS: dict[str, ServerPreset] = {
    "vllm": ServerPreset(
        capabilities=_PREEMPTS | {protocol.MIN_TOKENS},
        policy="chunk",
        body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        preemptions=("vllm:num_preemptions_total",),
    ),
    "sglang": ServerPreset(
        capabilities=_PREEMPTS | {protocol.MIN_TOKENS},
        policy="chunk",
        body={"return_token_ids": True},
        preemptions=("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
    ),
    "llama.cpp": ServerPreset(
        body={"cache_prompt": True, "grammar": _WHOLE_CHARACTERS}, num_forbidden=200
    ),
}


def preset_named(name: str) -> ServerPreset:
    """The preset of that name.

    Raises:
        ServerStartError: there is none.
    """
    if name not in PRESETS:
        raise ServerStartError(
            f"There is no server preset {name!r}.", f"Presets are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def count_of(names: Sequence[str], metrics: str) -> int:
    """Sum of a counter over its labels; 0 while the server has not counted anything yet.

    Args:
        names: that the counter has had in the server's versions.
        metrics: Prometheus text format.
    """
    listed = "|".join(map(re.escape, names))
    pattern = rf"^(?:{listed})(?:{{.*}})?\s+(\S+)"
    return int(sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE)))


def pieces(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream.

    Raises:
        http.client.HTTPException: the server refused, or the stream broke off.
    """
    if response.status != http.client.OK:
        text = response.read().decode(errors="replace")
        raise http.client.HTTPException(f"status {response.status}: {text[:300]}")
    for line in response:
        data = line.decode(errors="replace").strip()
        if data == "data: [DONE]":
            return
        if data.startswith("data:"):
            yield json.loads(data.removeprefix("data:"))
        elif data.startswith("error:"):
            yield {"error": data.removeprefix("error:").strip()}
    raise http.client.HTTPException("the stream ended without [DONE]")


def tokens_of(choice: Mapping[str, Any]) -> Iterator[tuple[int, dict[int, float]]]:
    """Token ids of a piece, each with the log probabilities that came with it.

    What is likelier than a greedy server's own choice was forbidden to it: end-of-sequence tokens,
    which it was asked to ignore. llama.cpp tells more: there all that is forbidden is left out.
    """
    for token_id, best in _all_tokens_of(choice):
        own = best.get(token_id, 0.0)
        yield token_id, {other: value for other, value in best.items() if value <= own}


def _all_tokens_of(choice: Mapping[str, Any]) -> Iterator[tuple[int, dict[int, float]]]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:  # llama.cpp, in the form of chat completions
        for entry in logprobs["content"]:
            best = {
                item["id"]: item["logprob"]
                for item in entry.get("top_logprobs", ())
                if _may_be_chosen(item)
            }
            yield entry["id"], {entry["id"]: entry["logprob"], **best}
        return
    chosen = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or []
    for index, token_id in enumerate(choice.get("token_ids") or ()):
        best = {
            int(name.removeprefix(_ID)): value
            for name, value in (tops[index] if index < len(tops) else None or {}).items()
            if name.startswith(_ID)
        }
        yield token_id, best | ({token_id: chosen[index]} if index < len(chosen) else {})


def _may_be_chosen(item: Mapping[str, Any]) -> bool:
    """Whether the preset of llama.cpp leaves the token to choose: ASCII, no end of the sequence.

    Ends have no text; nor have other control tokens, which are no alternatives here either.
    """
    text = item.get("bytes")
    return text is None or (bool(text) and all(byte < _END_OF_ASCII for byte in text))
