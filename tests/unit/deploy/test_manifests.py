"""The manifests: rendered by kubectl where it is, and held against what the server really takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from service.command_line import server_command_line
from tests.contract.serving import READY_SERVICE

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="renders with kubectl kustomize")
NAME = {"app.kubernetes.io/name": "kvarts"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def server() -> dict[str, Any]:
    (stateful,) = documents(DEPLOY / "base" / "statefulset.yaml")
    return cast("dict[str, Any]", stateful["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (only,) = server()["containers"]
    return only


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_file_is_yaml_without_repeated_keys(path: Path) -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        nodes = cast("list[tuple[yaml.ScalarNode, yaml.Node]]", node.value)
        keys = [key.value for key, _ in nodes]
        assert len(set(keys)) == len(keys), (path.name, keys)
        return dict(cast("dict[Any, Any]", yaml.SafeLoader.construct_mapping(loader, node, True)))

    Strict.add_constructor("tag:yaml.org,2002:map", mapping)
    list(yaml.load_all(path.read_text(), Strict))


@needs_kubectl
@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        ("base", ["NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"]),
        (
            "envoy",
            [
                *("ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget"),
                *("Service", "Service", "StatefulSet"),
            ],
        ),
        ("monitoring", ["ConfigMap", "PodMonitor", "PrometheusRule"]),
    ],
)
def test_kustomize_renders(folder: str, kinds: Sequence[str]) -> None:
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", str(DEPLOY / folder)], capture_output=True, check=True, text=True
    )
    rendered = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert sorted(one["kind"] for one in rendered) == list(kinds)


def test_every_selector_selects_the_pods_and_no_others() -> None:
    base = DEPLOY / "base"
    (stateful,) = documents(base / "statefulset.yaml")
    assert stateful["spec"]["template"]["metadata"]["labels"] == NAME
    assert stateful["spec"]["selector"] == {"matchLabels": NAME}
    assert documents(base / "service.yaml")[0]["spec"]["selector"] == NAME
    assert documents(base / "disruption.yaml")[0]["spec"]["selector"] == {"matchLabels": NAME}
    assert documents(base / "network.yaml")[0]["spec"]["podSelector"] == {"matchLabels": NAME}
    monitor = documents(DEPLOY / "monitoring" / "podmonitor.yaml")[0]
    assert monitor["spec"]["selector"] == {"matchLabels": NAME}


def test_the_flags_are_the_servers(tmp_path: Path) -> None:
    """The command line of the manifest, with this machine's folders in the place of the pod's."""
    keys, slots, model = tmp_path / "keys", tmp_path / "slots", tmp_path / "model.gguf"
    keys.write_text("key\n")
    slots.mkdir()
    model.touch()
    mine = {
        "/etc/kvarts/keys/keys": str(keys),
        "/var/lib/kvarts/slots": str(slots),
        "/models/model.gguf": str(model),
    }
    given: list[str] = container()["args"]
    words = [mine.get(word, word) for word in given]
    options = server_command_line(words, {"HOME": str(tmp_path)}).service
    assert options.shutdown_timeout_s == 45
    assert (options.grpc_port, options.metrics_port) == (50051, 9464)
    assert options.api_keys == ("key",)
    assert options.key_file is not None
    assert options.log_format == "json"
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": 8080, "grpc": 50051, "metrics": 9464}


def test_drain_probes_and_grace_fit_each_other() -> None:
    pod, box = server(), container()
    assert box["startupProbe"]["grpc"]["service"] == READY_SERVICE
    assert box["readinessProbe"]["grpc"]["service"] == READY_SERVICE
    # Alive is the empty name: a model that loads is no reason to start anew.
    assert "service" not in box["livenessProbe"]["grpc"]
    waits_s = int(box["lifecycle"]["preStop"]["exec"]["command"][1])
    words: list[str] = box["args"]
    drain_s = int(words[words.index("--shutdown-timeout") + 1])
    # The server's own margin is 2 s.
    assert pod["terminationGracePeriodSeconds"] >= waits_s + drain_s + 2


@pytest.mark.parametrize("name", ["base/statefulset.yaml", "envoy/front.yaml"])
def test_pods_keep_to_the_restricted_standard(name: str) -> None:
    """Source: Kubernetes, Pod Security Standards, "restricted"."""
    pod = documents(DEPLOY / name)[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for box in pod["containers"]:
        rights = box["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["readOnlyRootFilesystem"] is True
        assert box["resources"]["limits"]["memory"]
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    for volume in pod["volumes"]:
        assert len(allowed & set(volume)) == 1


def test_the_image_ends_as_nobody_in_a_folder_that_it_may_write() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    user = re.search(r"^USER (\d+):(\d+)$", last, re.M)
    assert user is not None
    assert user[1] == str(server()["securityContext"]["runAsUser"])
    assert "--require-hashes" in text
    for mount in container()["volumeMounts"]:
        if not mount.get("readOnly") and mount["mountPath"] != "/tmp":
            assert mount["mountPath"] in last


def test_the_front_is_an_edge() -> None:
    """Source: Envoy, "Configuring Envoy as an edge proxy"."""
    (config,) = documents(DEPLOY / "envoy" / "envoy.yaml")
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    (listener,) = config["static_resources"]["listeners"]
    assert listener["per_connection_buffer_limit_bytes"] == 32768
    ((chain,),) = [listener["filter_chains"]]
    manager = chain["filters"][0]["typed_config"]
    assert manager["http2_protocol_options"] == {
        "max_concurrent_streams": 100,
        "initial_stream_window_size": 65536,
        "initial_connection_window_size": 1048576,
    }
    assert (manager["stream_idle_timeout"], manager["request_timeout"]) == ("0s", "0s")
    (host,) = manager["route_config"]["virtual_hosts"]
    for route in host["routes"]:
        first = route["route"]["hash_policy"][0]
        assert first == {"header": {"header_name": "x-session-id"}, "terminal": True}
    clusters = {one["name"]: one for one in config["static_resources"]["clusters"]}
    assert {one["lb_policy"] for one in clusters.values()} == {"MAGLEV"}
    for route in host["routes"]:
        # Its table gives another replica at each try; a ring gives the neighbour again.
        assert route["route"]["retry_policy"]["host_selection_retry_max_attempts"] > 1
    for one in clusters.values():
        (check,) = one["health_checks"]
        assert check["no_traffic_interval"] == check["interval"]
    check = clusters["grpc"]["health_checks"][0]["grpc_health_check"]
    assert check == {"service_name": READY_SERVICE}
    # yaml-cpp, which Envoy reads with, knows no merge keys.
    assert "<<:" not in (DEPLOY / "envoy" / "envoy.yaml").read_text()
