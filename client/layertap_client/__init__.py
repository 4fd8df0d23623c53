"""Layers of models on a layertap server as numpy arrays: ``Client`` for blocking calls, ``AsyncClient`` to await.

All errors are ``LayertapError``; what a server refuses is a ``ProblemError`` with its status, detail and hint.
"""

from layertap_client.client import AsyncClient, Client
from layertap_client.embedding import Embedded
from layertap_client.errors import (
    BadReplyError,
    ConnectionFailedError,
    DeadlineError,
    Fault,
    FingerprintChangedError,
    InputError,
    InvalidRequestError,
    LayertapError,
    ProblemError,
    ReplyTimeoutError,
    TooLargeError,
)
from layertap_client.exchange import RetryPolicy
from layertap_client.extractor import Activations, RemoteExtractor, hooks
from layertap_client.messages import Reply
from layertap_client.models import Layer, Layers, Model, Models
from layertap_client.results import Comparison, Result
from layertap_client.streams import AsyncEmbeddingStream, Embeddings, EmbeddingStream

__version__ = "0.1.0"
__all__ = [
    "Activations",
    "AsyncClient",
    "AsyncEmbeddingStream",
    "BadReplyError",
    "Client",
    "Comparison",
    "ConnectionFailedError",
    "DeadlineError",
    "Embedded",
    "EmbeddingStream",
    "Embeddings",
    "Fault",
    "FingerprintChangedError",
    "InputError",
    "InvalidRequestError",
    "Layer",
    "Layers",
    "LayertapError",
    "Model",
    "Models",
    "ProblemError",
    "RemoteExtractor",
    "Reply",
    "ReplyTimeoutError",
    "Result",
    "RetryPolicy",
    "TooLargeError",
    "hooks",
]
