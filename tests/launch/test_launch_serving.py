"""The launch files of servers: their parts fit each other and what `spec-jax serve` takes."""

import json
from pathlib import Path

import pytest
import yaml

from spec_jax.cli.commands import parse
from spec_jax.sharding import Layout

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def objects(name: str) -> dict[str, dict]:
    text = (LAUNCH / name).read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture(params=["gke_serve_jobset.yaml", "gke_serve_deployment.yaml"])
def served(request) -> tuple[dict, dict, dict, int]:
    """Service, metadata and spec of a pod, and the hosts that decode together."""
    parts = objects(request.param)
    if "JobSet" in parts:
        (replicated,) = parts["JobSet"]["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert job["parallelism"] == job["completions"]
        name = parts["JobSet"]["metadata"]["name"]
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "batch.kubernetes.io/job-completion-index": "0",
        }
        return parts["Service"], labels, job["template"]["spec"], job["parallelism"]
    template = parts["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    return parts["Service"], labels, template["spec"], 1


def test_requests_reach_the_process_that_listens(served):
    service, labels, pod, _ = served
    assert service["spec"]["selector"] == labels
    (port,) = service["spec"]["ports"]
    (container,) = pod["containers"]
    options = parse(container["args"][0], container["args"][1:])
    assert port["targetPort"] == options.port == container["ports"][0]["containerPort"]
    assert options.host == "0.0.0.0"
    for name in ("readinessProbe", "startupProbe"):
        if name in container:
            assert container[name]["httpGet"] == {"path": "/health", "port": options.port}
    assert "readinessProbe" in container


def test_the_layout_has_the_chips_of_the_hosts(served):
    _, _, pod, hosts = served
    (container,) = pod["containers"]
    options = parse("serve", container["args"][1:])
    layout = Layout.read(LAUNCH.parent / options.llm["layout"])
    assert layout.processes == hosts
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips * hosts == layout.size
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert rows * columns == layout.size


def test_it_ends_before_it_is_killed_and_knows_its_key(served, monkeypatch):
    _, _, pod, _ = served
    (container,) = pod["containers"]
    names = {each["name"]: each for each in container["env"]}
    monkeypatch.setenv("SPEC_JAX_API_KEY", "secret")
    options = parse("serve", container["args"][1:])
    assert pod["terminationGracePeriodSeconds"] > options.shutdown_timeout + 10
    assert options.api_key == ("secret",)
    secret = names["SPEC_JAX_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "spec-jax-key", "key": "SPEC_JAX_API_KEY"}
    assert parse("serve", [*container["args"][1:], "--api-key", "mine"]).api_key == ("mine",)


def test_the_image_serves():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    assert any(line.startswith("RUN pip install") and "serve" in line for line in lines)
    (command,) = (json.loads(each[4:]) for each in lines if each.startswith("CMD "))
    options = parse(command[1], command[2:])
    assert command[0] == "spec-jax" and (options.host, options.port) == ("0.0.0.0", 8000)
    assert f"EXPOSE {options.port}" in lines
