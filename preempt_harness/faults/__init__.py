"""Recreated bugs of the embedded engine: what the suite and the search must find.

A fault is data: a mechanism in one sentence, where it was seen in public, the checks that should
say so, and a few lines of the engine replaced by wrong ones. `preempt-harness audit` plants each
and counts who finds it. No generator and no scenario may name a fault.
"""

from preempt_harness.faults.catalogue import all_faults, fault_named, select_faults
from preempt_harness.faults.fault import (
    Fault,
    FaultError,
    FaultTargetError,
    Patch,
    UnknownFaultError,
)
from preempt_harness.faults.patching import PlantedFault, plant

__all__ = [
    "Fault",
    "FaultError",
    "FaultTargetError",
    "Patch",
    "PlantedFault",
    "UnknownFaultError",
    "all_faults",
    "fault_named",
    "plant",
    "select_faults",
]
