"""python -m llmctl: the same as the llmctl command."""

import sys

from llmctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
