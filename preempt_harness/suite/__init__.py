"""The suite that ships: scenarios every engine should survive.

    pytest -p preempt_harness --pyargs preempt_harness.suite [--preempt-engine NAME]

Lengths are multiples of the block size, so a scenario means the same at any block size; what an
engine cannot do is skipped with the reason.
"""
