"""`python -m harness` is `fp8ci`."""

import sys

from harness.cli import main

sys.exit(main())
