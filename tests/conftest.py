"""What must be set before torch is first imported."""

import os

# Some virtual machines announce AMX but hide the shape of its tiles; oneDNN's bf16 kernels then die of an illegal
# instruction. One step below AMX the same kernels exist everywhere, and the tests are about values, not speed.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Matrices this small gain nothing from a second thread, and on a busy machine threads spend their time waiting for
# each other: the copy task, beside two other programs on two cores, took not 50 seconds but more than ten minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
