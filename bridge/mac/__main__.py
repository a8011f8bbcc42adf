"""``python -m bridge.mac``: what ``scripts/setup_mac.sh`` starts, before anything is installed."""

import sys

from bridge.mac.edge import main

sys.exit(main(sys.argv[1:]))
