"""``python -m preempt_harness``: the same as the ``preempt-harness`` command."""

from preempt_harness.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
