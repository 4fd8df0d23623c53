"""Imported last by the process that hosts are forked from: no collector writes to what it has, which stays shared."""

import atexit
import gc
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server is told to end, and ends this by closing a connection
gc.collect()
gc.freeze()
atexit.register(os._exit, 0)  # it has nothing to tidy up, and libraries would write on the terminal while they end
