"""Layers of models on a layertap server as numpy arrays: ``Client`` for blocking calls, ``AsyncClient`` to await.

All errors are ``LayertapError``; what a server refuses is a ``ProblemError`` with its status, detail and hint.
"""

from layertap_client.client import AsyncClient, Client
from layertap_client.embedding import Embedded
from layertap_client.errors import (
    AuthenticationError,
    BadReplyError,
    BadRequestError,
    ConnectionFailedError,
    DeadlineError,
    Fault,
    FingerprintChangedError,
    ForbiddenError,
    InputError,
    InvalidRequestError,
    LayertapError,
    NotAcceptableError,
    NotFoundError,
    ProblemError,
    ReplyTimeoutError,
    ServerError,
    TooLargeError,
    TooManyRequestsError,
    UnavailableError,
    UnsupportedMediaError,
)
from layertap_client.exchange import RetryPolicy
from layertap_client.extractor import Activations, RemoteExtractor, hooks
from layertap_client.layers import Layer, Layers
from layertap_client.messages import Reply
from layertap_client.models import Model, Models
from layertap_client.results import Result
from layertap_client.streams import AsyncEmbeddingStream, Embeddings, EmbeddingStream

__version__ = "0.1.0"
__all__ = [
    "Activations",
    "AsyncClient",
    "AsyncEmbeddingStream",
    "AuthenticationError",
    "BadReplyError",
    "BadRequestError",
    "Client",
    "ConnectionFailedError",
    "DeadlineError",
    "Embedded",
    "EmbeddingStream",
    "Embeddings",
    "Fault",
    "FingerprintChangedError",
    "ForbiddenError",
    "InputError",
    "InvalidRequestError",
    "Layer",
    "Layers",
    "LayertapError",
    "Model",
    "Models",
    "NotAcceptableError",
    "NotFoundError",
    "ProblemError",
    "RemoteExtractor",
    "Reply",
    "ReplyTimeoutError",
    "Result",
    "RetryPolicy",
    "ServerError",
    "TooLargeError",
    "TooManyRequestsError",
    "UnavailableError",
    "UnsupportedMediaError",
    "hooks",
]
