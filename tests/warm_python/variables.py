"""The variables of tests and of their processes."""

import os
import sys
import tempfile


def take() -> None:
    """Set them; what the caller has set for its own runs is no part of a test."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "HF_", "TRANSFORMERS_", "PYTHONWARNINGS"))]:
        del os.environ[name]
    os.environ |= {
        "OMP_NUM_THREADS": "1",  # two threads wait for each other on a busy machine, 4 ms in an update
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": os.path.join(tempfile.gettempdir(), "hf_compat-tests-datasets"),
        # DeepSpeed builds its code anew where another checkout has built it before, and a killed build leaves its lock
        "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions"),
    }
