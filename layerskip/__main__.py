"""``python -m layerskip``: the command line."""

import sys

from layerskip.cli import main

sys.exit(main())
