"""The string form of a preemption plan: written in one line, read back exactly.

    preempt:r0@out=3 / preempt-all@step=7:swap / squeeze:all@3..9 / random:p=0.05,max=3,seed=7

Owns the grammar (docs/plans.md) and its error messages. A shell leaves every character alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, assert_never

from preempt_harness._plan_actions import (
    MODES,
    Abort,
    Action,
    Anchor,
    BlockBoundary,
    Chunk,
    ComputedTokens,
    Every,
    Mode,
    OutputTokens,
    PlanError,
    Preempt,
    PreemptAll,
    RandomPreempt,
    Resume,
    Squeeze,
    Step,
)

SEPARATOR = "/"
_PARTS = re.compile(r"([^:@]+)(?::([^:@]*))?(?:@([^:@]*))?(?::([^:@]*))?")
_DIGITS = "[0-9]{1,20}"
_NAMES: dict[type[Anchor], str] = {
    Step: "step",
    OutputTokens: "out",
    ComputedTokens: "computed",
    Chunk: "chunk",
    Resume: "resume",
}
_ANCHORS: dict[str, Callable[[int], Anchor]] = {
    "step": Step,
    "out": OutputTokens,
    "computed": ComputedTokens,
    "chunk": Chunk,
    "resume": Resume,
}


# Writing ------------------------------------------------------------------------------------------


def encode(actions: Iterable[Action]) -> str:
    """The string form; "" for no action."""
    return SEPARATOR.join(encode_action(action) for action in actions)


def encode_action(action: Action) -> str:
    """The string form of one action; it also names the action in a record."""
    match action:
        case Preempt():
            return f"preempt:{action.request}@{encode_anchor(action.at)}{_suffix(action.mode)}"
        case PreemptAll():
            return f"preempt-all@{encode_anchor(action.at)}{_suffix(action.mode)}"
        case Squeeze():
            return f"squeeze:{action.blocks}@{action.start}..{action.stop}"
        case Abort():
            return f"abort:{action.request}@{encode_anchor(action.at)}"
        case RandomPreempt():
            options = f"p={action.probability!r},max={action.max_count},seed={action.seed}"
            return f"random:{options}{_suffix(action.mode)}"
        case Every():
            request = f",request={action.request}" if action.request else ""
            return f"every:{action.steps},max={action.max_count}{request}{_suffix(action.mode)}"
    assert_never(action)


def encode_anchor(anchor: Anchor) -> str:
    """The string form of an anchor."""
    match anchor:
        case Step():
            return f"step={anchor.number}"
        case BlockBoundary():
            offset = f"{anchor.offset:+d}" if anchor.offset else ""
            return f"block={anchor.block}{offset}"
        case _:
            return f"{_NAMES[type(anchor)]}={anchor.count}"


def _suffix(mode: Mode) -> str:
    return "" if mode == "recompute" else f":{mode}"


# Reading ------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[Action, ...]:
    """Read what `encode` wrote; spaces around actions do not matter.

    Raises:
        PlanError: names the action by number and text, and says what would be right.
    """
    if not text.strip():
        return ()
    actions = []
    for number, part in enumerate(text.split(SEPARATOR), start=1):
        part = part.strip()
        try:
            actions.append(_parse_action(part))
        except PlanError as error:
            message = f'In action {number} of the plan, "{part}": {error.message}'
            raise PlanError(message, error.advice) from None
    return tuple(actions)


def _parse_action(part: str) -> Action:
    if not part:
        raise PlanError("there is nothing.", f"Put one {SEPARATOR!r} between two actions.")
    found = _PARTS.fullmatch(part)
    if found is None:
        raise PlanError(
            "it has too many ':' or '@'.", "Write kind:target@anchor:mode, with parts left out."
        )
    kind, target, when, mode = found.groups()
    match kind:
        case "preempt":
            return Preempt(
                _needed(target, "request", "r0"),
                _parse_anchor(_needed(when, "anchor", "@out=3")),
                _parse_mode(mode),
            )
        case "preempt-all":
            _refuse(target, "preempt-all takes no target", "preempt-all@step=7")
            return PreemptAll(_parse_anchor(_needed(when, "anchor", "@step=7")), _parse_mode(mode))
        case "squeeze":
            _refuse(mode, "squeeze takes no mode", "squeeze:all@3..9")
            return _parse_squeeze(_needed(target, "number of blocks", "5"), when)
        case "abort":
            _refuse(mode, "abort takes no mode", "abort:r0@out=3")
            anchor = _parse_anchor(_needed(when, "anchor", "@out=3"))
            return Abort(_needed(target, "request", "r0"), anchor)
        case "random":
            _refuse(when, "random takes no anchor", "random:p=0.05,max=3,seed=7")
            return _parse_random(_needed(target, "options", "p=0.05,max=3,seed=7"), mode)
        case "every":
            _refuse(when, "every takes no anchor", "every:4,max=8")
            return _parse_every(_needed(target, "number of steps", "4"), mode)
    kinds = ("preempt", "preempt-all", "squeeze", "abort", "random", "every")
    raise PlanError(f"action {kind!r} is unknown.", _suggest(kind, kinds))


def _parse_anchor(text: str) -> Anchor:
    name, equals, value = text.partition("=")
    if name == "block" and equals:
        found = re.fullmatch(rf"({_DIGITS})([+-]{_DIGITS})?", value)
        if found is None:
            raise PlanError(
                f"anchor {text!r} is no block.", "Write block=2, block=2+1 or block=2-1."
            )
        return BlockBoundary(int(found[1]), int(found[2] or 0))
    if name not in _ANCHORS:
        raise PlanError(f"anchor {name!r} is unknown.", _suggest(name, (*_ANCHORS, "block")))
    return _ANCHORS[name](_parse_integer(value, f"anchor {text!r}", f"{name}=3"))


def _parse_squeeze(target: str, when: str | None) -> Squeeze:
    blocks: int | Literal["all"] = "all"
    if target != "all":
        blocks = _parse_integer(target, f"squeeze of {target!r} blocks", "5, or all")
    found = re.fullmatch(rf"({_DIGITS})\.\.({_DIGITS})", when or "")
    if found is None:
        raise PlanError(f"{when!r} is no range of steps.", "Write squeeze:all@3..9.")
    return Squeeze(blocks, int(found[1]), int(found[2]))


def _parse_random(target: str, mode: str | None) -> RandomPreempt:
    options = _parse_options(target.split(","), ("p", "max", "seed"))
    for name in ("p", "max", "seed"):
        if name not in options:
            raise PlanError(f"{name} is missing.", "Write random:p=0.05,max=3,seed=7.")
    try:
        probability = float(options["p"])
    except ValueError:
        raise PlanError(f"p={options['p']} is no number.", "Write p=0.05.") from None
    return RandomPreempt(
        probability,
        _parse_integer(options["max"], "max", "max=3"),
        _parse_integer(options["seed"], "seed", "seed=7"),
        _parse_mode(mode),
    )


def _parse_every(target: str, mode: str | None) -> Every:
    steps, *rest = target.split(",")
    options = _parse_options(rest, ("max", "request"))
    if "max" not in options:
        raise PlanError("max is missing.", "Write every:4,max=8.")
    return Every(
        _parse_integer(steps, "the number of steps", "every:4,max=8"),
        _parse_integer(options["max"], "max", "max=8"),
        options.get("request", ""),
        _parse_mode(mode),
    )


def _parse_options(parts: Sequence[str], known: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in known or not equals or not value:
            raise PlanError(f"option {part!r} is unknown.", _suggest(name, known))
        if name in options:
            raise PlanError(f"option {name!r} is given twice.", "Leave one out.")
        options[name] = value
    return options


def _parse_integer(text: str, what: str, example: str) -> int:
    if not re.fullmatch(_DIGITS, text):
        raise PlanError(f"{what} is no whole number.", f"Write {example}.")
    return int(text)


def _parse_mode(text: str | None) -> Mode:
    if text is None:
        return "recompute"
    for mode in MODES:
        if text == mode:
            return mode
    raise PlanError(f"mode {text!r} is unknown.", _suggest(text, MODES))


def _needed(text: str | None, what: str, example: str) -> str:
    if not text:
        raise PlanError(f"the {what} is missing.", f"Write it, such as {example}.")
    return text


def _refuse(text: str | None, message: str, example: str) -> None:
    if text is not None:
        raise PlanError(f"{message}.", f"Write {example}.")


def _suggest(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
