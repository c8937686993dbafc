"""The manifests for Kubernetes: sound, with no more rights than are said, and fit for the programs they start."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polythrottle.actuation.server.main import _parser
from polythrottle.daemon.pods.kubernetes import ACCOUNT, KUBELET_SOCKET
from polythrottle.daemon.pods.residents import Wish, wish_of
from polythrottle.daemon.settings import check, read_settings
from polythrottle.storage.paths import ACTUATOR_SOCKET

FOLDER = Path(__file__).resolve().parent.parent / "packaging" / "kubernetes"
BASE = FOLDER / "base"
OVERLAYS = ("runtime-class", "node-power")
VERSIONS = ("1.29", "1.33", "1.37")
MANIFESTS = ("base/namespace.yaml", "base/rbac.yaml", "base/daemonset.yaml", "examples/pod.yaml")


def documents(name: str) -> Iterator[Any]:
    """Yield the documents of a file."""
    yield from yaml.safe_load_all((FOLDER / name).read_text())


def pod() -> Any:
    """Return the specification of the pod on each node."""
    (found,) = documents("base/daemonset.yaml")
    return found["spec"]["template"]["spec"]


def containers() -> dict[str, Any]:
    """Return its containers by name."""
    return {each["name"]: each for each in (*pod()["initContainers"], *pod()["containers"])}


CAPABILITIES = {"restore": ["SYS_ADMIN"], "folders": ["CHOWN"], "actuator": ["SYS_ADMIN"], "kubelet": [], "daemon": []}
DAEMON = 65532


def test_only_the_actuator_and_restoring_may_set_gpus() -> None:
    """By SYS_ADMIN alone; nobody is privileged or sees the host's processes or network, all run from images."""
    assert pod()["hostPID"] is False
    assert pod()["hostNetwork"] is False
    assert "hostIPC" not in pod()
    for name, each in containers().items():
        secured = each["securityContext"]
        assert secured["privileged"] is False
        assert secured["readOnlyRootFilesystem"] is True
        assert secured["seccompProfile"] == {"type": "RuntimeDefault"}
        assert secured["capabilities"]["drop"] == ["ALL"]
        assert secured["capabilities"].get("add", []) == CAPABILITIES[name]
        if "SYS_ADMIN" not in CAPABILITIES[name]:  # which Kubernetes counts as escalation
            assert secured["allowPrivilegeEscalation"] is False


def test_the_daemon_is_nobody_on_the_node() -> None:
    """It alone is not root, and the user whom the actuator's image knows as polythrottle, whose group may connect."""
    users = {name: each["securityContext"]["runAsUser"] for name, each in containers().items()}
    assert users == dict.fromkeys(CAPABILITIES, 0) | {"daemon": DAEMON}
    assert containers()["daemon"]["securityContext"]["runAsNonRoot"] is True
    install = (FOLDER.parent / "containers/install").read_text()
    assert f"'polythrottle:x:{DAEMON}:{DAEMON}:" in install
    assert f"'polythrottle:x:{DAEMON}:'" in install
    for name in ("actuator", "kubelet", "daemon"):
        assert containers()[name]["securityContext"]["runAsGroup"] == DAEMON
    assert pod()["securityContext"] == {"fsGroup": DAEMON}
    assert (
        pod()["volumes"][[each["name"] for each in pod()["volumes"]].index("account")]["projected"]["defaultMode"]
        == 0o440
    )


def test_the_daemon_may_write_where_it_has_to_and_nowhere_else() -> None:
    """Its own two folders, given to it before it starts, and memory; the kubelet's folder it does not even see."""
    mounts = containers()["daemon"]["volumeMounts"]
    written = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    command = containers()["folders"]["command"]
    assert command[:2] == ["chown", f"{DAEMON}:{DAEMON}"]
    assert written == {*command[2:], "/tmp"}
    assert set(command[2:]) == {mount["mountPath"] for mount in containers()["folders"]["volumeMounts"]}
    seeing = [
        name
        for name, each in containers().items()
        if any(mount["name"] == "pod-resources" for mount in each["volumeMounts"])
    ]
    assert seeing == ["kubelet"]


def test_the_cluster_lets_the_daemon_get_pods_and_nothing_else() -> None:
    """One rule, one verb; the token is given to the daemon alone."""
    roles = [each for each in documents("base/rbac.yaml") if each["kind"] == "ClusterRole"]
    assert [each["rules"] for each in roles] == [[{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]]
    assert pod()["automountServiceAccountToken"] is False
    with_token = [
        name for name, each in containers().items() if any(mount["name"] == "account" for mount in each["volumeMounts"])
    ]
    assert with_token == ["daemon"]


def test_every_mount_has_a_volume_and_every_volume_a_mount() -> None:
    """No name leads nowhere; the host's folders are those that are said, and its machine's identity."""
    mounted = {mount["name"] for each in containers().values() for mount in each["volumeMounts"]}
    volumes = {each["name"]: each for each in pod()["volumes"]}
    assert mounted == set(volumes)
    assert {each["hostPath"]["path"] for each in volumes.values() if "hostPath" in each} == {
        "/var/lib/polythrottle",
        "/var/lib/polythrottle-daemon",
        "/etc/machine-id",
        "/etc/polythrottle",
        "/run/polythrottle",
        "/run/polythrottle/daemon",
        "/var/lib/kubelet/pod-resources",
    }


def test_paths_are_those_the_programs_look_at() -> None:
    """Sockets, settings, profiles and the account's token are mounted where the daemon and the actuator expect them."""
    daemon = containers()["daemon"]
    mounts = {Path(mount["mountPath"]) for mount in daemon["volumeMounts"]}
    environment = {each["name"]: each["value"] for each in daemon["env"]}
    settings = read_settings(BASE / "daemon.toml")
    check(settings)
    assert settings.kubernetes is not None
    assert {ACCOUNT, settings.kubernetes.profiles} <= mounts
    relay = containers()["kubelet"]
    assert relay["command"][-2:] == [str(KUBELET_SOCKET), str(settings.kubernetes.kubelet)]
    passed = {Path(mount["mountPath"]): mount.get("readOnly", False) for mount in relay["volumeMounts"]}
    assert passed == {KUBELET_SOCKET.parent: True, settings.kubernetes.kubelet.parent: False}
    assert settings.kubernetes.kubelet.parent in mounts
    config = next(word for word in daemon["command"] if word.startswith("--config="))
    assert Path(config.partition("=")[2]).parent in mounts
    given = _parser().parse_args(containers()["actuator"]["command"][1:])
    assert settings.actuator == given.socket == Path(environment["POLYTHROTTLE_RUN_DIR"]) / ACTUATOR_SOCKET
    assert given.device == ["nvml:all"]
    assert Path(environment["POLYTHROTTLE_STATE_DIR"]) in mounts


def test_programs_are_those_that_are_installed() -> None:
    """Every command is a script of the package or of every base image; its options are known."""
    project = (FOLDER.parent.parent / "pyproject.toml").read_text()
    for name, each in containers().items():
        program = each["command"][0]
        if name == "kubelet":
            assert each["command"][:3] == ["python", "-m", "polythrottle.daemon.pods.kubelet_relay"]
        elif name != "folders":
            assert f"\n{program} = " in project
    done = subprocess.run(
        [sys.executable, "-m", "polythrottle", "daemon", "run", "--help"], capture_output=True, text=True, check=True
    )
    assert "--config" in done.stdout


def test_every_container_is_of_its_roles_image_and_starts_in_order() -> None:
    """Restoring ends before the actuator begins, which is there before the daemon and outlives it."""
    images = {name: each["image"] for name, each in containers().items()}
    assert images == dict.fromkeys(CAPABILITIES, "polythrottle-actuator") | {"daemon": "polythrottle-daemon"}
    (kustomization,) = documents("base/kustomization.yaml")
    assert {each["name"] for each in kustomization["images"]} == set(images.values())
    roles = (FOLDER.parent / "containers/Containerfile").read_text()
    assert all(f" AS {image.removeprefix('polythrottle-')}\n" in roles for image in images.values())
    assert [(each["name"], each.get("restartPolicy")) for each in pod()["initContainers"]] == [
        ("restore", None),
        ("folders", None),
        ("actuator", "Always"),
        ("kubelet", "Always"),
    ]


def test_the_example_pods_annotations_are_understood() -> None:
    """As the daemon reads them."""
    (example,) = documents("examples/pod.yaml")
    annotations = example["metadata"]["annotations"]
    assert wish_of(annotations) == Wish("chat", ("p99<=2s",), weight=2.0, metrics="8000/metrics")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_leads_to_what_is_there(overlay: str) -> None:
    """Its files are there, its settings are sound, and what it patches has that name."""
    folder = FOLDER / "overlays" / overlay
    (document,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    assert [(folder / each).resolve() for each in document["resources"]] == [BASE]
    for generator in document.get("configMapGenerator", ()):
        for name in generator["files"]:
            check(read_settings(folder / name))
    for patch in document.get("patches", ()):
        assert patch["target"] == {"kind": "DaemonSet", "name": "polythrottle"}
        for step in yaml.safe_load(patch["patch"]):
            assert step["op"] == "add"
            assert step["path"].startswith("/spec/template/spec/")


def rendered(name: str) -> list[Any]:
    """Return a Kustomize folder's objects; those of its files where there is no kubectl to render them."""
    if shutil.which("kubectl") is None:
        return [each for file in MANIFESTS[:3] for each in documents(file)]
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_sound_for_kubernetes(version: str) -> None:
    """By the schemas of the oldest version with sidecars, one between and the newest, no unknown field allowed."""
    import kubernetes_validate

    for name in ("base", *(f"overlays/{each}" for each in OVERLAYS)):
        for each in (*rendered(name), *documents("examples/pod.yaml")):
            kubernetes_validate.validate(json.loads(json.dumps(each)), version, strict=True)


def test_the_schemas_find_a_fault() -> None:
    """A field that is misspelt is refused, so that the test above can fail."""
    import kubernetes_validate

    (wrong,) = documents("base/daemonset.yaml")
    wrong["spec"]["template"]["spec"]["hostPid"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
