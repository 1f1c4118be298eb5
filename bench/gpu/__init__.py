"""What ``bench/gpu_check.py`` is made of. It takes ``layerskip`` from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
