"""The chart and KServe's runtime, by tools: Helm's own engine renders, Kubernetes' schemas judge.

``deploy/helm/requirements.txt`` brings both; without them this file is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from layertap.service.config.configuration import read_configuration
from layertap.service.settings import Settings
from tests.service.support import Json

helm = pytest.importorskip("helm_python", reason="there is no Helm: deploy/helm/requirements.txt has it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="deploy/helm/requirements.txt has the schemas")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "layertap"
KSERVE = ROOT / "deploy" / "kserve"
KEYS: Json = {"keys": {"apiKeys": ["first", "second"]}}
VERSIONS = ("1.28", kubernetes_validate.latest_version())  # of Kubernetes: an old one and the newest
OTHERS = frozenset({"ServiceMonitor"})  # of what is installed on top of Kubernetes, and no schema here knows
FULL: Json = {
    "keys": {"apiKeys": ["first"], "adminKeys": ["admin"]},
    "settings": {"DEADLINE_S": 12.5, "DRAIN_DELAY_S": "3", "SLOW_REQUEST_S": 5, "TRUSTED_PROXIES": "10.0.0.0/8"},
    "models": {"models": [{"name": "r", "source": "torchvision:resnet18", "weights": "random:0"}]},
    "autoscaling": {"enabled": True, "queueSeconds": "250m"},
    "disruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True, "keySecret": {"name": "metrics", "key": "key"}},
    "storage": {"existingClaim": "weights"},
    "service": {"type": "LoadBalancer", "port": 8080},
    "rollingUpdate": {"maxUnavailable": "50%", "maxSurge": 0},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "x"},
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "imagePullSecrets": [{"name": "registry"}],
}
EXISTING: Json = {"keys": {"existingSecret": "mine", "existingAdminKeys": True}}
CASES: dict[str, Json] = {
    "plain": KEYS,
    "full": FULL,
    "existing": EXISTING,
    "gpu": {**KEYS, **yaml.safe_load((CHART / "values-gpu.yaml").read_text())},
}


def render(values: Json, release: str = "demo") -> dict[str, Json]:
    """What a release would be, by kind."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=release, namespace="prod")
    documents = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    objects = [each for each in documents if each]
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def container(objects: dict[str, Json]) -> Any:
    """The one of the deployment's pods."""
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def environment(objects: dict[str, Json]) -> dict[str, str]:
    """What its server finds in the environment; of files their paths."""
    found = {name: value for name, value in objects["ConfigMap"]["data"].items() if name.startswith("LAYERTAP_")}
    return {**found, **{each["name"]: each["value"] for each in container(objects)["env"]}}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_valid(name: str, version: str) -> None:
    """Whatever the values, every object has the fields that Kubernetes knows, and no other."""
    objects = render(CASES[name])
    for kind, each in objects.items():
        if kind not in OTHERS:
            kubernetes_validate.validate(each, version, strict=True)
    assert {"ConfigMap", "Deployment", "Service"} <= set(objects)


def test_a_wrong_field_is_found() -> None:
    """The judge is no rubber stamp: a field that there is not is an error."""
    deployment = render(KEYS)["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", CASES)
def test_the_server_takes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment and the models of a pod are such as the server starts with, keys of the Secret included."""
    objects = render(CASES[name])
    secret = objects.get("Secret", {"stringData": {"api-keys": "a", "admin-keys": "b"}})["stringData"]
    for variable, value in environment(objects).items():
        if value.startswith("/etc/layertap/keys/"):
            file = tmp_path / Path(value).name
            file.write_text(secret[file.name])
            value = str(file)
        monkeypatch.setenv(variable, value)
    settings = Settings()
    assert settings.requires_key
    assert bool(settings.admin_keys) == (name in ("full", "existing"))
    if "models.yaml" in objects["ConfigMap"]["data"]:
        (tmp_path / "models.yaml").write_text(objects["ConfigMap"]["data"]["models.yaml"])
        assert [spec.name for spec in read_configuration(tmp_path / "models.yaml").models] == ["r"]
        assert str(settings.config) == "/etc/layertap/models.yaml"
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert settings.drain_delay_s is not None
    assert spec["terminationGracePeriodSeconds"] >= settings.drain_delay_s + settings.deadline_s + 5


@pytest.mark.parametrize("name", CASES)
def test_few_rights(name: str) -> None:
    """A pod runs as a user of its own, with no capability, no token and a root that nobody writes to."""
    objects = render(CASES[name])
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # else a Service named layertap sets LAYERTAP_PORT
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {each["mountPath"] for each in container(objects)["volumeMounts"]}
    assert {"/tmp", "/var/lib/layertap"} <= mounts  # all that is ever written
    assert container(objects)["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container(objects)["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_autoscaling() -> None:
    """Pods follow the seconds in the queue, and their number is not set by the chart then."""
    objects = render(FULL)
    assert "replicas" not in objects["Deployment"]["spec"]
    autoscaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    (metric,) = autoscaler["metrics"]
    assert metric["pods"]["metric"]["name"] == "layertap_queue_seconds"
    assert metric["pods"]["target"]["averageValue"] == "250m"
    assert "HorizontalPodAutoscaler" not in render(KEYS)


def test_scraped_as_alarms_expect() -> None:
    """Prometheus' operator gives the server's figures the job that the alarms look for, whatever the release's name."""
    objects = render(FULL, "features")
    label = objects["ServiceMonitor"]["spec"]["jobLabel"]
    job = objects["Service"]["metadata"]["labels"][label]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "API keys"),
        ({**KEYS, "replica": 2}, "replica"),
        ({**KEYS, "settings": {"API_KEYS": "secret"}}, "API_KEYS"),
        ({**KEYS, "settings": {"PORT": 9000}}, "PORT"),
        ({"keys": {"apiKeys": ["two words"]}}, "apiKeys"),
        ({**KEYS, "serviceMonitor": {"enabled": True}}, "keySecret"),
        ({**KEYS, "rollingUpdate": {"maxSurge": 0}}, "rollingUpdate"),  # Kubernetes refuses 0 for both
    ],
)
def test_refused(values: Json, says: str) -> None:
    """A mistake in the values is told by the name of what is wrong, and nothing is rendered."""
    with pytest.raises(helm.HelmError, match=re.escape(says)):
        render(values)


def test_kserve() -> None:
    """KServe's runtime speaks v2, and its containers are such as Kubernetes runs."""
    runtime = yaml.safe_load((KSERVE / "servingruntime.yaml").read_text())
    spec = runtime["spec"]
    assert spec["protocolVersions"] == ["v2"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": spec["containers"], "volumes": spec["volumes"]},
    }
    kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    service = yaml.safe_load((KSERVE / "inferenceservice.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in spec["supportedModelFormats"]]
    assert {
        each["httpGet"]["path"]
        for each in (spec["containers"][0][f"{name}Probe"] for name in ("readiness", "liveness"))
    } == {
        "/v2/health/ready",
        "/v2/health/live",
    }
