"""Tests of the suite that nano-vllm-fork 20260210 is known to fail; written up in the docs.

For one rank (`--preempt-tp 1`). On two, hardly any test passes: the ranks above 0 lose the token
ids of whoever is preempted in decode.
"""

from __future__ import annotations

from preempt_harness.adapters.protocol import KnownIssue

VERSION = "20260210"
_PAGE = "docs/adapters/nano-vllm-scheduler.md"

# A victim stays in the queue of those that run: it grows without a table, or runs twice.
_TWICE = (
    "test_preemption_infeasible",
    "test_prompt_length_in_a_tight_pool[3-*",
    "test_a_pool_in_which_each_fits_only_alone",
    "test_mixture[2]",
    "test_mixture[3]",
    "test_mixture[12]",
    "test_mixture[15]",
    "test_tight_pool[whole-*",
    "test_block_size[8]",
    "test_block_size[16]",
    "test_unequal_lengths_do_not_preempt_each_other_for_ever",
    "test_late_arrivals",
    "test_squeezed_pool[*",
    "test_a_bystander_takes_the_freed_blocks[*",
    "test_equal_later_blocks_under_different_first_blocks",
    "test_a_prompt_that_begins_with_a_later_block_of_another",
    "test_preempted_in_decode[*",
    "test_batches_of_changing_size_in_a_tight_pool",
    "test_a_second_batch_after_a_tight_one[*",
    "test_newcomers_queue_behind_those_who_were_preempted[*",
    "test_who_comes_back_is_not_the_next_victim[*",
)
# A prompt that the pool or a step's budget can never hold waits for ever, until nobody else does.
_NOTHING_SCHEDULED = (
    "test_a_prompt_larger_than_the_pool_ends_alone",
    "test_a_prompt_larger_than_the_pool_is_answered_by_an_idle_engine",
    "test_a_request_too_large_is_refused_alone",
    "test_mixture[1]",
    "test_mixture[8]",
    "test_mixture[11]",
)
# Two ranks, whatever the command line says.
_TOKEN_IDS_LOST = (
    "test_long_context[recompute]",
    "test_block_size_reaches_every_rank[8]",
)


def _issue(code: str, scenario: str, section: str) -> KnownIssue:
    return KnownIssue(code=code, scenario=scenario, versions=VERSION, link=f"{_PAGE}#{section}")


ISSUES: tuple[KnownIssue, ...] = (
    *(_issue("CRASH-EXCEPTION", name, "a-victim-that-runs-on") for name in _TWICE),
    _issue("ACC-QUEUE", "test_mixture[0]", "a-victim-that-runs-on"),
    *(_issue("CRASH-EXCEPTION", name, "nothing-to-schedule") for name in _NOTHING_SCHEDULED),
    _issue(
        "CRASH-EXCEPTION",
        "test_a_prefix_that_is_asked_for_again[whole]",
        "a-prompt-that-is-cached-whole",
    ),
    *(_issue("CRASH-EXCEPTION", name, "token-ids-that-are-lost") for name in _TOKEN_IDS_LOST),
)
