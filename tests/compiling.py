"""Compiler options of programs that run for long, against the flags of conftest."""

import os

OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
