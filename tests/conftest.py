"""What must be set before torch is first imported."""

import os

# Some virtual machines announce AMX but hide the shape of its tiles; oneDNN's bf16 kernels then die of an illegal
# instruction. One step below AMX the same kernels exist everywhere, and the tests are about values, not speed.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
