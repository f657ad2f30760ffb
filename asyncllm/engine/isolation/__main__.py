"""`python -m asyncllm.engine.isolation SOCKET HOST`: how a host starts its child. The socket is a file descriptor that
it has handed down, the host the number of its process."""

from __future__ import annotations

import sys

from asyncllm.engine.isolation.child import main

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
