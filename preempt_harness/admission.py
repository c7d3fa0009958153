"""How an engine admits and preempts: the model an adapter declares, and a simulator of it.

The facade of both. No engine, no torch.
"""

from preempt_harness._admission_model import (
    AdmissionModel,
    AdmissionModelError,
    AdmissionPolicy,
    may_stop_early,
)
from preempt_harness._admission_result import PredictedPreemption, Simulation
from preempt_harness._admission_simulator import simulate

__all__ = [
    "AdmissionModel",
    "AdmissionModelError",
    "AdmissionPolicy",
    "PredictedPreemption",
    "Simulation",
    "may_stop_early",
    "simulate",
]
