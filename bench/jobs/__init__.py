"""Jobs of people who look inside models, each as a request and as a script of the library that they use."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of the peers; tqdm reads it when it is first imported
os.environ.setdefault("LAYERTAP_DEADLINE_S", "600")  # of the server: the first request of a job may be slow
