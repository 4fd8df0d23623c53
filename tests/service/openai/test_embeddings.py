"""The ``openai`` package, as it is published, and our embeddings: equal to native ones, errors in its own classes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import transformers
from openai import OpenAI
from sentence_transformers.util import quantize_embeddings

from layertap.models.digits import spec as digits
from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, image, net, picture, text64
from tests.transformers_nets import saved, tokenizer

PICTURES = [picture(seed) for seed in range(5)]
ALIASES = {"ACME/bert-small": "bert", "bert:latest": "bert", "digits:block1": "gpt2"}
TEXTS = ["a cat sat on the mat", "the dog saw the cat", "a red dog and a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of texts."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(serve: Serve, folder: Path) -> Iterator[Live]:
    """A server of pictures and of texts, which takes four inputs a request."""
    for name in ("bert", "gpt2"):
        saved(name, folder / name)
        tokenizer(folder / name)
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in ("bert", "gpt2")]
    short = replace(digits(), name="short", dimensions=(1, 16, 63))
    configuration = configured(*specs, short, net("never", "Never", required=False))
    with serve(replace(configuration, aliases=ALIASES), max_inputs=4) as live:
        yield live


@pytest.fixture(scope="module")
def client(served: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{text64(data)}"


def native(live: Live, **body: object) -> Array:
    """The only result of the native route."""
    (found,) = arrays_of(live.client.post("/extract", json={"normalize": True, **body})).values()
    return found


def vectors(reply: openai.types.CreateEmbeddingResponse) -> Array:
    assert [each.index for each in reply.data] == list(range(len(reply.data)))
    return np.array([each.embedding for each in reply.data], np.float32)


def test_texts(served: Live, client: OpenAI) -> None:
    """Texts give what the native route gives, of length 1, with their tokens counted and their fingerprint."""
    reply = client.embeddings.with_raw_response.create(model="bert", input=TEXTS)
    body = reply.parse()
    expected = native(served, model="bert", inputs=[{"text": text} for text in TEXTS])
    np.testing.assert_allclose(vectors(body), expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors(body), axis=1), 1, atol=1e-5)
    assert (body.model, body.object) == ("bert", "list")
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    assert (body.usage.prompt_tokens, body.usage.total_tokens) == (tokens, tokens)
    native_reply = served.client.post(
        "/extract", json={"model": "bert", "normalize": True, "inputs": [{"text": TEXTS[0]}]}
    )
    assert reply.headers["x-layertap-fingerprint"] == native_reply.headers["x-layertap-fingerprint"]


@pytest.mark.parametrize("form", ["uri", "object", "base64"])
def test_pictures(served: Live, client: OpenAI, form: str) -> None:
    """Pictures as data URIs, and as other servers take them, give what the native route gives."""
    forms = {
        "uri": [uri(data) for data in PICTURES[:3]],
        "object": [{"image": uri(data)} for data in PICTURES[:3]],
        "base64": [{"image": text64(data)} for data in PICTURES[:3]],
    }
    reply = client.embeddings.create(model="digits", input=forms[form])  # type: ignore[arg-type]
    expected = native(served, inputs=[image(data) for data in PICTURES[:3]])
    np.testing.assert_allclose(vectors(reply), expected, atol=1e-6)
    assert reply.usage.prompt_tokens == 0


def test_layer(served: Live, client: OpenAI) -> None:
    """``NAME:LAYER`` is that layer as an embedding: pooled to a vector, of its output or its input."""
    for layer, pool in (("block2", "mean"), ("head:input", "flatten"), ("head", "flatten")):
        reply = client.embeddings.create(model=f"digits:{layer}", input=uri(PICTURES[0]))
        expected = native(served, inputs=[image(PICTURES[0])], layers=[layer], pool=pool)
        np.testing.assert_allclose(vectors(reply), expected, atol=1e-6)
        assert reply.model == f"digits:{layer}"


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits(served: Live, client: OpenAI, precision: str) -> None:
    """A bit for each number, as sentence-transformers packs them, with a fingerprint of its own."""
    given = {"model": "bert", "input": TEXTS}
    plain = client.embeddings.with_raw_response.create(**given)
    reply = client.embeddings.with_raw_response.create(**given, encoding_format=precision)  # type: ignore[call-overload]
    found = np.array([each.embedding for each in reply.parse().data])
    expected = quantize_embeddings(vectors(plain.parse()), precision=precision)  # type: ignore[arg-type]
    assert np.array_equal(found, expected)
    assert reply.headers["x-layertap-fingerprint"] != plain.headers["x-layertap-fingerprint"]


def test_aliases(served: Live, client: OpenAI) -> None:
    """Names of the hub and tags name models, and come before a layer of that name; layers may follow them."""
    expected = native(served, model="bert", inputs=[{"text": TEXTS[0]}])
    layer = native(served, model="bert", inputs=[{"text": TEXTS[0]}], layers=["encoder.layer.0"], pool="mean")
    wanted = {"ACME/bert-small": expected, "bert:latest": expected, "bert:latest:encoder.layer.0": layer}
    for model_id, vector in wanted.items():
        reply = client.embeddings.create(model=model_id, input=TEXTS[0])
        np.testing.assert_allclose(vectors(reply), vector, atol=1e-6)
        assert reply.model == model_id
    tagged = client.embeddings.create(model="digits:block1", input=TEXTS[0])
    np.testing.assert_allclose(vectors(tagged), native(served, model="gpt2", inputs=[{"text": TEXTS[0]}]), atol=1e-6)
    assert {each.id for each in client.models.list()} >= ALIASES.keys()
    assert client.models.retrieve("ACME/bert-small").id == "ACME/bert-small"


@pytest.mark.parametrize("text", ["data: a cat sat", "data:image/png;base64,AAAA", "Data:,"])
def test_texts_like_pictures(served: Live, client: OpenAI, text: str) -> None:
    """What begins like the address of a picture is a text where a model takes no pictures."""
    reply = client.embeddings.create(model="bert", input=[text, TEXTS[0]])
    expected = native(served, model="bert", inputs=[{"text": text}, {"text": TEXTS[0]}])
    np.testing.assert_allclose(vectors(reply), expected, atol=1e-6)
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="digits", input=[uri(PICTURES[0]), text])
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["param"] == "input[1]"


def test_many_inputs(served: Live, client: OpenAI) -> None:
    """More inputs than a request may have are answered all the same, a part after another."""
    given = [uri(PICTURES[place % 5]) for place in range(11)]
    reply = client.embeddings.create(model="digits", input=given)
    single = [native(served, inputs=[image(data)]) for data in PICTURES]
    np.testing.assert_allclose(vectors(reply), np.concatenate([single[place % 5] for place in range(11)]), atol=1e-6)


def test_dimensions(served: Live, client: OpenAI) -> None:
    """Dimensions that a model was trained for are the first numbers at length 1, with a fingerprint of their own.

    All of them change nothing.
    """
    given = [uri(data) for data in PICTURES[:3]]
    whole = client.embeddings.with_raw_response.create(model="short", input=given)
    rows = vectors(whole.parse())
    columns = rows.shape[1]
    same = client.embeddings.with_raw_response.create(model="short", input=given, dimensions=columns)
    assert vectors(same.parse()).tobytes() == rows.tobytes()
    assert same.headers["x-layertap-fingerprint"] == whole.headers["x-layertap-fingerprint"]
    seen = {whole.headers["x-layertap-fingerprint"]}
    for dimensions in (1, 16, columns - 1):
        reply = client.embeddings.with_raw_response.create(model="short", input=given, dimensions=dimensions)
        first = rows[:, :dimensions]
        expected = first / np.linalg.norm(first, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors(reply.parse()), expected, atol=1e-6)
        seen.add(reply.headers["x-layertap-fingerprint"])
    assert len(seen) == 4


def test_fields_of_other_servers(client: OpenAI) -> None:
    """Optional fields may be null, and unknown ones are ignored, with a warning that names them."""
    nothing = dict.fromkeys(("encoding_format", "dimensions", "user", "modality", "prompt", "truncate"))
    others = {"input_type": "query", "encoding": "x"}
    create = client.embeddings.with_raw_response.create
    plain = create(model="bert", input=TEXTS[0], encoding_format="float")
    nulls = create(model="bert", input=TEXTS[0], extra_body=nothing)
    ignored = create(model="bert", input=TEXTS[0], extra_body=others)
    assert len({vectors(each.parse()).tobytes() for each in (plain, nulls, ignored)}) == 1
    assert nulls.headers.get("x-layertap-warnings") == plain.headers.get("x-layertap-warnings")
    assert "'input_type', 'encoding'" in ignored.headers["x-layertap-warnings"]


def test_tokens(folder: Path, client: OpenAI) -> None:
    """Ids of the model's own tokenizer, which a caller says that they are, give what its texts give."""
    encode = transformers.AutoTokenizer.from_pretrained(folder / "bert").encode
    ids = [encode(text) for text in TEXTS]
    expected = vectors(client.embeddings.create(model="bert", input=TEXTS))
    given = {"modality": "tokens"}
    np.testing.assert_allclose(
        vectors(client.embeddings.create(model="bert", input=ids, extra_body=given)), expected, atol=1e-6
    )
    one = client.embeddings.create(model="bert", input=ids[0], extra_body=given)
    np.testing.assert_allclose(vectors(one), expected[:1], atol=1e-6)


def test_models(served: Live, client: OpenAI) -> None:
    """Models are listed by id, with what their vectors are where they are loaded."""
    listed = {each.id: each for each in client.models.list()}
    assert set(listed) == {"digits", "bert", "gpt2", "short", "never", *ALIASES}
    reply = client.embeddings.with_raw_response.create(model="digits", input=uri(PICTURES[0]))
    digits: Json = listed["digits"].model_dump()
    assert digits["fingerprint"] == reply.headers["x-layertap-fingerprint"]
    assert digits["dimensions"] == len(reply.parse().data[0].embedding)
    assert client.models.retrieve("digits").model_dump() == digits
    layer: Json = client.models.retrieve("digits:block2").model_dump()
    assert layer["dimensions"] == 32
    assert layer["fingerprint"] != digits["fingerprint"]


REFUSED: dict[str, tuple[Json, type[openai.APIStatusError], str | None, str]] = {
    "unknown model": ({"model": "digit"}, openai.NotFoundError, None, "'digits'"),
    "unknown layer": ({"model": "digits:block9"}, openai.BadRequestError, "model", "block1"),
    "a text": ({"input": "a cat"}, openai.BadRequestError, "input[0]", "takes no text"),
    "no picture": ({"input": [uri(b"none")]}, openai.BadRequestError, "input[0]", "not a picture"),
    "a URL": ({"input": [{"image": "http://example.org/a.png"}]}, openai.BadRequestError, "input[0]", "URL"),
    "tokens": ({"model": "bert", "input": [1, 2, 3]}, openai.BadRequestError, "input[0]", "own tokenizer"),
    "a text for tokens": (
        {"model": "bert", "input": "hello", "extra_body": {"modality": "tokens"}},
        openai.BadRequestError,
        "input[0]",
        "not a list of token ids",
    ),
    "nothing": ({"input": []}, openai.BadRequestError, "input", "at least 1"),
    "too many": ({"input": ["a"] * 2049}, openai.BadRequestError, "input", "2048"),
    "untrained dimensions": ({"dimensions": 32}, openai.BadRequestError, None, "dimensions: [64, 128, 256]"),
    "other dimensions": ({"model": "short", "dimensions": 32}, openai.BadRequestError, None, "has 1, 16, 63, 64"),
    "not loaded": ({"model": "never"}, openai.InternalServerError, None, "could not be loaded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors(client: OpenAI, case: str) -> None:
    """What can't be done raises the client's own errors, and says what to do instead."""
    body, kind, parameter, words = REFUSED[case]
    with pytest.raises(kind) as raised:
        client.embeddings.create(**{"model": "digits", "input": uri(PICTURES[0]), **body})
    assert words in raised.value.message
    error = raised.value.body
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == parameter


def test_other_errors(served: Live, client: OpenAI) -> None:
    """What is no route, no method, no JSON or no format on offer is told in the same envelope."""
    post = served.client.post
    good = {"model": "digits", "input": uri(PICTURES[0])}
    replies: dict[int, list[httpx.Response]] = {
        404: [post("/v1/completions", json={}), served.client.get("/v1")],
        405: [served.client.get("/v1/embeddings")],
        400: [post("/v1/embeddings", content=b"{", headers={"content-type": "application/json"})],
        406: [post("/v1/embeddings", json=good, headers={"accept": "image/png"})],
        415: [post("/v1/embeddings", content=b"x", headers={"content-type": "image/png"})],
    }
    for status, each in replies.items():
        for reply in each:
            assert reply.status_code == status, reply.text
            assert set(reply.json()) == {"error"}
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert set(served.client.get("/v2").json()) != {"error"}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("digit")


def test_keys(serve: Serve) -> None:
    """A key is the client's own; without one it is an authentication error."""
    with serve(configured(), api_keys="secret-key") as live:
        with OpenAI(base_url=f"{live.url}/v1", api_key="secret-key", max_retries=0) as good:
            assert [each.id for each in good.models.list()] == ["digits"]
            assert len(good.embeddings.create(model="digits", input=uri(PICTURES[0])).data) == 1
        with OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as bad:
            with pytest.raises(openai.AuthenticationError, match="not known"):
                bad.models.list()
            with pytest.raises(openai.AuthenticationError):
                bad.embeddings.create(model="digits", input="a")


def test_full_queue(served: Live, client: OpenAI) -> None:
    """A client that finds the queue full is told when to come again."""
    with served.engine.admission.admit(math.inf) as ticket:
        ticket.reserve_bytes(served.engine.settings.max_queue_bytes)
        with pytest.raises(openai.RateLimitError) as raised:
            client.embeddings.create(model="digits", input=[uri(PICTURES[0])])
    assert int(raised.value.response.headers["retry-after"]) >= 1
