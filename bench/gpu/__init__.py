"""What ``bench/gpu_check.py`` and ``bench/gpu_bench.py`` are made of.

Both take ``layerskip`` from the checkout.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
