"""How tests compile: quickly, or with XLA's optimizations what then runs for long."""

from importlib import metadata

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
# More than half of compiling; XLA stops at a flag that it does not know.
if metadata.version("jaxlib").startswith("0.10."):
    QUICK |= {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    OPTIMIZED |= {"xla_cpu_use_fusion_emitters": True}
