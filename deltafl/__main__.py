"""`python -m deltafl` is the command line."""

import sys

from deltafl.cli import main

sys.exit(main())
