"""A picture search by LangChain: its OpenAI embeddings class and its store in memory, with this server's address."""

from __future__ import annotations

import argparse
import base64
import os
from pathlib import Path

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from pictures import make_digits

GALLERY, NEAREST = 200, 5


def make_uri(png: bytes) -> str:
    """A picture as text."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def main() -> None:
    """Put digits into a store, and print the labels of those that are most like one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", type=Path, default=Path(__file__).with_name("digit.png"))
    parser.add_argument("--url", default=os.environ.get("LAYERTAP_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    embeddings = OpenAIEmbeddings(
        model="digits",
        base_url=f"{arguments.url}/v1",
        api_key=os.environ.get("LAYERTAP_API_KEY", "none"),
        check_embedding_ctx_length=False,
    )
    gallery, _ = make_digits()
    store = InMemoryVectorStore(embeddings)
    store.add_texts(
        [make_uri(png) for _, png in gallery[:GALLERY]],
        [{"label": name.partition("-")[0]} for name, _ in gallery[:GALLERY]],
    )
    found = store.similarity_search(make_uri(arguments.picture.read_bytes()), NEAREST)
    print(f"nearest to {arguments.picture.name}:", *(document.metadata["label"] for document in found))


if __name__ == "__main__":
    main()
