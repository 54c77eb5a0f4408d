"""Every overlay of docker/k8s as `kubectl apply -k` would send it, with and without each
component, against the schemas.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support import assert_flags_exist, missing

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
FOLDER = DOCKER / "k8s"
OVERLAYS = ("base", "operator", "gpu")
COMPONENTS = ("prometheus-operator", "models", "network-policy", "scaling")
KUBERNETES = "1.31"  # the oldest that is supported: what is valid there is valid later
OPERATOR = "monitoring.coreos.com/v1"
Document = dict[str, Any]


@functools.cache
def built(overlay: Path) -> tuple[Document, ...]:
    """What `kubectl kustomize` makes of a folder."""
    kubectl = shutil.which("kubectl") or missing(
        "kubectl", "kubernetes.io/docs/tasks/tools says how to install it"
    )
    result = subprocess.run(
        [kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "no deprecated field"
    return tuple(yaml.safe_load_all(result.stdout))


def of(kind: str, documents: tuple[Document, ...]) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return copy.deepcopy(found)


def kinds(documents: tuple[Document, ...]) -> set[str]:
    return {document["kind"] for document in documents}


def own_components(overlay: str) -> set[str]:
    named = yaml.safe_load((FOLDER / overlay / "kustomization.yaml").read_text()).get(
        "components", []
    )
    return {Path(name).name for name in named}


# The two kinds of the operator, as far as they are used here: a key that is not named is a spelling
# mistake.
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def strict(properties: Document, *required: str) -> Document:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required or properties),
    }


def listed(items: Document) -> Document:
    return {"type": "array", "items": items, "minItems": 1}


RULE = {
    "oneOf": [
        strict({"record": {"type": "string"}, "expr": {"type": "string"}}),
        strict(
            {
                "alert": {"type": "string"},
                "expr": {"type": "string"},
                "for": DURATION,
                "labels": TEXTS,
                "annotations": TEXTS,
            }
        ),
    ]
}
ENDPOINT = strict({"port": {"type": "string"}, "path": {"type": "string"}, "interval": DURATION})
SPECS = {
    "ServiceMonitor": strict(
        {
            "jobLabel": {"type": "string"},
            "selector": strict({"matchLabels": TEXTS}),
            "endpoints": listed(ENDPOINT),
        },
    ),
    "PrometheusRule": strict(
        {"groups": listed(strict({"name": {"type": "string"}, "rules": listed(RULE)}))}
    ),
}


def validate(document: Document) -> None:
    """Raises kubernetes_validate.ValidationError or jsonschema.ValidationError."""
    if document["apiVersion"] == OPERATOR:
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(document["spec"], SPECS[document["kind"]])
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str) -> None:
    documents = built(FOLDER / overlay)
    assert {"Deployment", "Service"} <= kinds(documents)
    for document in documents:
        validate(document)


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_what_needs_no_operator_names_none_of_its_kinds(overlay: str) -> None:
    """A cluster without the CRDs refuses the whole `apply`."""
    assert [
        document["kind"]
        for document in built(FOLDER / overlay)
        if document["apiVersion"] == OPERATOR
    ] == []
    assert kinds(built(FOLDER / "operator")) == {
        "Deployment",
        "Service",
        "ServiceMonitor",
        "PrometheusRule",
    }


def combined(overlay: str, components: tuple[str, ...], folder: Path) -> tuple[Document, ...]:
    """An overlay of a user's own, on top."""
    shutil.copytree(FOLDER, folder / "k8s")
    mine = folder / "k8s/mine"
    mine.mkdir()
    own = {
        "resources": [f"../{overlay}"],
        "components": [f"../components/{name}" for name in components],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return built(mine)


CHOICES = [
    (overlay, components)
    for overlay in OVERLAYS
    for number in range(1, len(COMPONENTS) + 1)
    for components in itertools.combinations(COMPONENTS, number)
    if not own_components(overlay) & set(components)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlay", "components"),
    CHOICES,
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_overlay_takes_every_component_that_it_lacks(
    overlay: str, components: tuple[str, ...], tmp_path: Path
) -> None:
    documents = combined(overlay, components, tmp_path)
    for document in documents:
        validate(document)
    adds = {
        "prometheus-operator": {"ServiceMonitor", "PrometheusRule"},
        "models": {"PersistentVolumeClaim"},
        "network-policy": {"NetworkPolicy"},
        "scaling": {"HorizontalPodAutoscaler", "PodDisruptionBudget"},
    }
    assert kinds(documents) == kinds(built(FOLDER / overlay)).union(
        *(adds[name] for name in components)
    )


def test_a_rollout_does_not_wait_for_a_claim_that_the_old_pod_holds(tmp_path: Path) -> None:
    documents = combined("base", ("models",), tmp_path)
    assert of("PersistentVolumeClaim", documents)["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert of("Deployment", documents)["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_overlay_of_the_readme_names_ones_own_image_model_and_namespace(
    overlay: str, tmp_path: Path
) -> None:
    blocks = re.findall(r"(?s)```yaml\n(.*?)```", (DOCKER / "README.md").read_text())
    (printed,) = (block for block in blocks if "kind: Kustomization" in block)
    assert "../base" in printed
    shutil.copytree(FOLDER, tmp_path / "k8s")
    (mine := tmp_path / "k8s/mine").mkdir()
    (mine / "kustomization.yaml").write_text(printed.replace("../base", f"../{overlay}"))
    documents = built(mine)
    for document in documents:
        validate(document)
        assert document["metadata"]["namespace"] == "kendall"
    gateway = container(documents)
    version = importlib.metadata.version("kendall")
    assert gateway["image"] == f"registry.example/kendall:{version}-cpu"
    assert gateway["args"][:2] == ["serve", "Qwen/Qwen2.5-0.5B-Instruct"]


def test_a_misspelt_key_is_found() -> None:
    for document in built(FOLDER / "operator"):
        wrong = copy.deepcopy(document)
        wrong["spec"]["selektor"] = wrong["spec"].pop("selector", {})
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            validate(wrong)
    rule = of("PrometheusRule", built(FOLDER / "operator"))
    rule["spec"]["groups"][1]["rules"][0]["anotations"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(rule)


@pytest.mark.parametrize(
    ("overlay", "component"),
    [(overlay, name) for overlay in OVERLAYS for name in sorted(own_components(overlay))],
)
def test_a_component_that_an_overlay_has_already_is_refused_and_the_readme_says_so(
    overlay: str, component: str, tmp_path: Path
) -> None:
    refused = "may not add resource with an already registered id"
    with pytest.raises(AssertionError, match=refused):
        combined(overlay, (component,), tmp_path)
    said = " ".join((FOLDER.parent / "README.md").read_text().split())
    assert f"`{overlay}` has `{component}`" in said
    assert refused in said


def test_every_folder_of_overlays_and_components_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*OVERLAYS, "watch", "components"}
    assert {path.name for path in (FOLDER / "components").iterdir()} == set(COMPONENTS)


def test_a_watch_beside_servers_is_reached_where_its_documentation_says() -> None:
    """Its flags are those of the command, its ports those of its service, and it may write nowhere
    but into its own volumes.
    """
    documents = built(FOLDER / "watch")
    for document in documents:
        validate(document)
    watch, service = container(documents), of("Service", documents)
    command, *arguments = watch["args"]
    assert_flags_exist(command, arguments)
    flags = dict(argument.split("=", 1) for argument in arguments)
    ports = {each["name"]: each["containerPort"] for each in watch["ports"]}
    assert (flags["--otlp"], flags["--port"]) == (
        f"0.0.0.0:{ports['otlp']}",
        str(ports["http"]),
    )
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
    selected = of("Deployment", documents)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == selected
    assert watch["securityContext"]["readOnlyRootFilesystem"] is True
    said = (ROOT / "docs/watch.md").read_text()
    assert f"http://{service['metadata']['name']}:{ports['otlp']}/v1/traces" in said
    assert "kubectl apply -k docker/k8s/watch" in said


def test_the_release_by_which_prometheus_selects_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "k8s")
    file = tmp_path / "k8s/operator/kustomization.yaml"
    (line,) = (line for line in file.read_text().splitlines() if "labels/release" in line)
    file.write_text(file.read_text().replace(line, line.replace("kube-prometheus-stack", "mine")))
    documents = built(tmp_path / "k8s/operator")
    assert {
        document["kind"]: document["metadata"]["labels"].get("release") for document in documents
    } == {
        "ServiceMonitor": "mine",
        "PrometheusRule": "mine",
        "Deployment": None,
        "Service": None,
    }


def container(documents: tuple[Document, ...]) -> Document:
    found: Document = of("Deployment", documents)["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_says_only_flags_that_the_command_has(overlay: str) -> None:
    command, *arguments = container(built(FOLDER / overlay))["args"]
    assert_flags_exist(command, arguments)


def test_the_gpu_overlay_has_a_gpu_the_cuda_image_a_model_and_its_volume() -> None:
    documents = built(FOLDER / "gpu")
    deployment, gateway = of("Deployment", documents), container(documents)
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert gateway["image"] == "kendall:cuda"
    assert gateway["resources"]["limits"]["nvidia.com/gpu"] == "1"
    base = container(built(FOLDER / "base"))["args"]
    assert [(a, b) for a, b in zip(base, gateway["args"], strict=True) if a != b] == [
        ("tiny", "Qwen/Qwen2.5-0.5B-Instruct")
    ]
    (line,) = (
        line
        for line in (FOLDER / "gpu/kustomization.yaml").read_text().splitlines()
        if "args/1" in line
    )
    assert line.endswith("# your model")
    claim = of("PersistentVolumeClaim", documents)["metadata"]["name"]
    (volume,) = (
        each
        for each in deployment["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    )
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    (mount,) = (each for each in gateway["volumeMounts"] if each["name"] == volume["name"])
    assert mount["mountPath"] in (DOCKER / "Dockerfile").read_text(), (
        "a folder that belongs to the user of the image"
    )


def test_a_pod_takes_the_token_of_hugging_face_from_a_secret_and_starts_without_it() -> None:
    (token,) = (
        each for each in container(built(FOLDER / "base"))["env"] if each["name"] == "HF_TOKEN"
    )
    assert token["valueFrom"]["secretKeyRef"] == {
        "name": "kendall-huggingface",
        "key": "HF_TOKEN",
        "optional": True,
    }
    assert (
        "generic kendall-huggingface --from-literal=HF_TOKEN=" in (DOCKER / "README.md").read_text()
    )


def test_the_pod_is_given_time_to_drain() -> None:
    """preStop, then --shutdown-timeout, then letting the engine go, within the grace period;
    clients are told 503 by then.
    """
    documents = built(FOLDER / "base")
    gateway = container(documents)
    grace = of("Deployment", documents)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    before = int(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(
        next(
            argument for argument in gateway["args"] if argument.startswith("--shutdown-timeout")
        ).split("=")[1]
    )
    assert before + drain + 15 <= grace
    readiness = gateway["readinessProbe"]
    assert before > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_probes_ask_what_the_gateway_answers_without_a_key() -> None:
    from kendall.server.security.routes import access_of

    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container(built(FOLDER / "base"))[probe]["httpGet"]["path"]
        assert access_of(path) == "open", path


def test_labels_ports_and_job_fit_together() -> None:
    documents = built(FOLDER / "operator")
    labels = of("Deployment", documents)["spec"]["template"]["metadata"]["labels"]
    service, monitor = of("Service", documents), of("ServiceMonitor", documents)
    assert of("Deployment", documents)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == container(documents)["ports"][0]["name"]
    assert monitor["spec"]["endpoints"][0]["port"] == port["name"]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (DOCKER / "rules.yml").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_root_file_system_is_read_only_and_what_is_written_has_a_volume(overlay: str) -> None:
    """The home of the image's user is not the home's cache: a mount below one is made by root."""
    documents = built(FOLDER / overlay)
    gateway = container(documents)
    assert gateway["securityContext"]["readOnlyRootFilesystem"] is True
    places = {mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert {
        "/tmp",
        "/dev/shm",
        "/home/kendall",
        "/home/kendall/.cache",
        "/var/lib/kendall",
    } <= places
    assert {mount["name"] for mount in gateway["volumeMounts"]} == {
        volume["name"]
        for volume in of("Deployment", documents)["spec"]["template"]["spec"]["volumes"]
    }


def test_the_network_policy_means_this_pod_and_its_port(tmp_path: Path) -> None:
    documents = combined("base", ("network-policy",), tmp_path)
    spec, pod = (
        of("NetworkPolicy", documents)["spec"],
        of("Deployment", documents)["spec"]["template"],
    )
    assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == {
        container(documents)["ports"][0]["name"]
    }
    assert all(rule.get("from") for rule in spec["ingress"]), (
        "a rule without `from` lets everybody in"
    )
    label = spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["kendall-client"]
    assert f'kendall-client: "{label}"' in (DOCKER / "README.md").read_text()


def test_budget_and_autoscaler_mean_this_deployment(tmp_path: Path) -> None:
    documents = combined("base", ("scaling",), tmp_path)
    deployment, autoscaler, budget = (
        of(kind, documents)
        for kind in ("Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget")
    )
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"], target["apiVersion"]) == (
        "Deployment",
        deployment["metadata"]["name"],
        deployment["apiVersion"],
    )
    assert (
        budget["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert "replicas" not in deployment["spec"], "the autoscaler sets them"
    metric = autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric in (DOCKER / "rules.yml").read_text()
    assert f"'{metric}{{" in (DOCKER / "README.md").read_text(), "the rule of the adapter"


def test_the_operators_rules_are_the_rules() -> None:
    """`make manifests` writes them."""
    assert of("PrometheusRule", built(FOLDER / "operator"))["spec"] == yaml.safe_load(
        (DOCKER / "rules.yml").read_text()
    )


def test_the_links_of_the_alerts_can_be_given_an_address(tmp_path: Path) -> None:
    shutil.copytree(DOCKER, tmp_path / "docker")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for base in ("https://example.org/kendall/", ""):  # and back
        subprocess.run(
            ["make", "-s", "manifests", f"RUNBOOK_BASE={base}"], cwd=tmp_path, check=True
        )
        links = re.findall(r"runbook_url: (\S+)", (tmp_path / "docker/rules.yml").read_text())
        assert len(links) == 9
        assert all(link.startswith(f"{base}docs/how-to/alarms.md#kendall") for link in links)
        rules = of("PrometheusRule", built(tmp_path / "docker/k8s/operator"))
        assert [
            rule["annotations"]["runbook_url"] for rule in rules["spec"]["groups"][1]["rules"]
        ] == links
        built.cache_clear()
    assert (tmp_path / "docker/rules.yml").read_text() == (DOCKER / "rules.yml").read_text()
