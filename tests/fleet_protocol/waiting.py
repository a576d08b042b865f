"""A process that writes its number into a file, and waits to be ended."""

import os
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(f"{os.getpid()}\n")
    threading.Event().wait(60)
