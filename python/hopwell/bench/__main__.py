"""The command line of `python -m hopwell.bench`."""

import sys

try:
    import torch  # noqa: F401  # every comparison uses tensors
except ImportError as error:
    sys.exit(f"hopwell.bench needs PyTorch ({error}): pip install torch, which is in hopwell's extra [bench]")

from .command import main

sys.exit(main())
