"""For this repository's own tests only; nothing here is part of the distribution."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
# Of a mutant one failure is wanted, not a small one.
_UNSHRUNK = (Phase.explicit, Phase.generate)
settings.register_profile(
    "mutation", derandomize=True, deadline=None, database=None, phases=_UNSHRUNK
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytest_plugins = ["pytester"]
