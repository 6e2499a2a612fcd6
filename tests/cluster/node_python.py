"""Programs of Python for the jobs of a node: forks of a server that lives and dies with the node.

    python node_python.py FOLDER

writes FOLDER/python, and serves it.
"""

import sys
import threading
from pathlib import Path

from forks import server
from quick_python import write_launchers

if __name__ == "__main__":
    # Before there are jobs: it takes seconds to import what they need.
    server()
    write_launchers(Path(sys.argv[1]), port="")
    threading.Event().wait()
