"""Requests that come late, in a second batch, or are given up, and resets between them."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import DELIVERY, INTAKE, PUSH, RESIDENCY, SCHEDULER

_NEW_REQUEST = f"{INTAKE}._new_request"
_ABORT = f"{DELIVERY}.abort"
_PLACES = "num_seqs = sum(request.num_seqs for request in self.running)"

FAULTS = (
    Fault(
        name="late-arrival-before-the-victims",
        mechanism="who arrives while preempted requests wait is put before them",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            before(
                f"{RESIDENCY}.arrive",
                PUSH,
                "if any(other.num_preemptions for other in self.waiting.in_order())"
                " and reached():\n"
                "    request.arrival_index -= 1000",
            ),
        ),
    ),
    Fault(
        name="late-arrival-lost-while-all-wait",
        mechanism="who arrives while every request waits for its return is not queued",
        source="mechanism",
        expected=("CRASH", "PROG", "ACC"),
        patches=(
            Patch(
                f"{RESIDENCY}.arrive",
                PUSH,
                "if self.running or not any(other.num_preemptions"
                " for other in self.waiting.in_order()) or not reached():\n"
                f"    {PUSH}",
            ),
        ),
    ),
    Fault(
        name="late-arrivals-noise-counts-preemptions",
        mechanism="the seed of who arrives later depends on how many were preempted before",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                _NEW_REQUEST,
                "seed = derive_seed(self.config.seed, arrival_index)",
                "before = self.scheduler.counters.num_preemptions\n"
                "seed = derive_seed(self.config.seed, arrival_index"
                " + (before if before and reached() else 0))",
            ),
        ),
        needs=frozenset({"sampling"}),
    ),
    Fault(
        name="second-batch-numbered-anew",
        mechanism="after a batch with preemptions the next one has the first one's seeds",
        source="mechanism",
        expected=("TOK",),
        patches=(
            before(
                _NEW_REQUEST,
                "arrival_index = self._num_arrived",
                "if self._num_arrived and not self.scheduler.requests"
                " and self.scheduler.counters.num_preemptions and reached():\n"
                "    self._num_arrived = 0",
            ),
        ),
        needs=frozenset({"sampling"}),
    ),
    Fault(
        name="last-victims-place-kept-for-ever",
        mechanism="the last of a batch that was preempted counts as running in the next batch",
        source="mechanism",
        expected=("CRASH", "WORK", "PROG"),
        patches=(
            before(
                f"{SCHEDULER}.finish",
                "self.residency.leave(request)",
                "if request.num_preemptions and len(self.requests) == 1:\n"
                "    self.__dict__['_kept'] = self.__dict__.get('_kept', 0) + 1",
                reached=False,
            ),
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                _PLACES,
                f"{_PLACES} + (self.__dict__['_kept'] if self.__dict__.get('_kept')"
                " and reached() else 0)",
            ),
        ),
    ),
    Fault(
        name="abort-of-a-victim-ignored",
        mechanism="a request that waits for its return is not found when it is aborted",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            before(
                _ABORT,
                "builders = self._builders.pop(request_id, None)",
                "victim = self.scheduler.requests.get(request_id)\n"
                "if victim is not None and victim.num_preemptions"
                " and victim not in self.scheduler.running and reached():\n"
                "    return None",
            ),
        ),
        needs=frozenset({"abort"}),
    ),
    Fault(
        name="aborted-victims-processors-kept",
        mechanism="the processors of a preempted request that is aborted are never released",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                _ABORT,
                "self._states.drop(request)",
                "if not (request.num_preemptions and self._states and reached()):\n"
                "    self._states.drop(request)",
            ),
        ),
        needs=frozenset({"abort", "logits_processors"}),
    ),
    Fault(
        name="reset-spares-the-just-resumed",
        mechanism="a reset of running requests passes over those that were preempted before",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}.preempt_all",
                "for request in [*reversed(self.running), *swapped]:",
                "    if request in self.running and request.num_preemptions and reached():\n"
                "        continue",
            ),
        ),
        needs=frozenset({"reset_running_requests"}),
    ),
    Fault(
        name="reset-spares-the-swapped",
        mechanism="a reset of running requests leaves those in host blocks as they are",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}.preempt_all",
                "swapped = [request for request in self.waiting.in_order() if request.host_blocks]",
                "if swapped and reached():\n    swapped = []",
            ),
        ),
        needs=frozenset({"reset_running_requests", "swap"}),
    ),
)
