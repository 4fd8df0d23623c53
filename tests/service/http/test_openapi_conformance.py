"""Requests drawn from the document that describes the interface: whatever it allows is answered as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from layertap.service.app import create_app
from layertap.service.settings import Settings
from tests.server import Live
from tests.service.support import Control, configured

TYPES = ("application/x-npy", "application/x-safetensors", "image/*")
ALWAYS = {200, 401, 403, 404, 422, 503}  # of routes that only say that there may be errors
FEW, MANY = 8, 1000


@schemathesis.serializer(*TYPES)
def as_it_is(context: object, value: bytes) -> bytes:
    """Bodies of bytes."""
    return value


DOCUMENT = create_app(Settings(), configured()).openapi()
OPERATIONS: dict[str, Any] = {
    each.ok().label: each.ok() for each in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
}


def asked(live: Live, name: str, data: st.DataObject) -> None:
    """Send a request that the document allows, and compare the answer with what it says of it."""
    case = data.draw(OPERATIONS[name].as_strategy())
    reply = case.call(base_url=live.url)
    case.validate_response(reply, checks=[content_type_conformance, response_schema_conformance])
    declared = OPERATIONS[name].definition.raw["responses"]
    statuses = {int(status) for status in declared if status != "default"}
    assert reply.status_code in (statuses if len(statuses) > 1 else ALWAYS)
    assert reply.status_code == 200 or len(reply.content) < 1024
    if reply.status_code == 200 and name.endswith("/unload"):  # no later request would load it
        assert live.client.post(f"/models/{reply.json()['name']}/load").status_code == 200


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
@settings(max_examples=FEW, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_documented(live: Live, name: str, data: st.DataObject) -> None:
    """No request that the document allows ends in an answer that it does not know."""
    asked(live, name, data)


@pytest.mark.hard
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_documented_at_length(live: Live, control: Control, name: str) -> None:
    """The same, very many times; the server is as well as before."""

    @given(data=st.data())
    @settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
    def many(data: st.DataObject) -> None:
        asked(live, name, data)

    many()
    control.check()
