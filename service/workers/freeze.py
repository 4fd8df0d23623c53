"""Imported last by the process that hosts are forked from: no collector writes to what it has, which stays shared."""

import atexit
import gc
import os

gc.collect()
gc.freeze()
atexit.register(os._exit, 0)  # it has nothing to tidy up, and libraries would write on the terminal while they end
