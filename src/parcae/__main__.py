"""`python -m parcae`, and so `torchrun -m parcae`."""

import sys

from parcae.cli import main

sys.exit(main())
