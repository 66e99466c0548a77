"""`python -m areal_tasks.engines.trainer`: the trainer, which ends with its supervisor, also during startup."""

import os
from typing import Final

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.garbage import importing

#: How torch page-locks host memory: by eight threads, where CUDA alone takes up to six times as long and holds up the
#: GPU's other work meanwhile (benchmarks/results/gpu-asynchrony.md). The user's own settings of torch's allocators win.
PAGE_LOCKING: Final = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"

if __name__ == "__main__":
    watch_lifeline()
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", PAGE_LOCKING)
    with importing():
        from areal_tasks.engines.trainer.process import main  # imports torch, for seconds

    main()
